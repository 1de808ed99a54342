"""Why a request took its time, ended early or missed the prefix cache: rules over its decision records."""

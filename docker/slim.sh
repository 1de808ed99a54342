#!/bin/sh
# Removes what packages bring for their own tests, and for extensions to torch in C++: `slim.sh ENVIRONMENT`.
set -eu
find "$1" -depth -type d -name tests -exec rm -r {} +
for torch in "$1"/lib/python3.*/site-packages/torch; do
    rm -rf "$torch/include" "$torch/test" "$torch"/bin/test_* "$torch"/bin/protoc*
done

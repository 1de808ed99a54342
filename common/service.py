"""The outermost part of every service: stacks on SIGUSR1, the log, the event loop, and errors as exit statuses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from typing import Any

from common.errors import InvalidConfig, QuireError
from common.process.debug import stacks_on_signal
from common.process.logs import setup_logging
from common.rpc import event_loop
from common.settings.config import refuse
from common.settings.options import ServiceSettings


def run_service(name: str, settings: ServiceSettings, serve: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run `serve` to its end; return the exit status that it returns (None counts as 0), or 1 after a QuireError.

    `name` is that of the service, such as router. Bad options end the process with status 2 and a line for each.
    """
    stacks_on_signal()
    setup_logging(name, settings.log_level, settings.log_format)
    try:
        return event_loop.run(serve()) or 0
    except InvalidConfig as error:
        refuse(error)
    except QuireError as error:
        print(f"quire-{name}: {error}", file=sys.stderr)  # noqa: T201
        return 1

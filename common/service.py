"""The outermost part of every service: stacks on SIGUSR1, the log, the event loop, and errors as exit statuses."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from common.contracts.errors import InvalidConfig, QuireError
from common.process.debug import stacks_on_signal
from common.process.logs import setup_logging
from common.rpc import event_loop
from common.rpc.grpc_internals import missing_words
from common.settings.config import ENV_PREFIX, FAILED_STATUS, refuse
from common.settings.options import ServiceSettings
from common.settings.service_links import in_words, service_links

log = logging.getLogger(__name__)

_NO_MEMORY = "out of memory; give the process more (ulimit -v, the container's limit), or choose a smaller model"


def run_service(name: str, settings: ServiceSettings, serve: Callable[[], Coroutine[Any, Any, int | None]]) -> int:
    """Run `serve` to its end; return the exit status that it returns (None counts as 0), or 1 after a QuireError.

    `name` is that of the service, such as router. Options that turn out bad end the process with status 2 and a line
    for each; a port that another process has ends it with PORT_TAKEN_STATUS.
    """
    stacks_on_signal()
    setup_logging(name, settings.log_level, settings.log_format)
    if missing := missing_words():
        log.warning("%s", missing)
    if links := service_links(os.environ, ENV_PREFIX):
        log.info("%s", in_words(links))
    try:
        return event_loop.run(serve()) or 0
    except InvalidConfig as error:
        refuse(error, f"quire-{name} cannot start:")
    except MemoryError:
        print(f"quire-{name}: {_NO_MEMORY}", file=sys.stderr)  # noqa: T201
        return FAILED_STATUS
    except QuireError as error:
        print(f"quire-{name}: {error}", file=sys.stderr)  # noqa: T201
        return FAILED_STATUS

"""Ranks of a worker as threads of the test: as cheap as the model is small, and without a process for each."""

from __future__ import annotations

import os
import socket
import threading
from multiprocessing.connection import Connection

from gpuworker.native.ranks import RankBoard
from gpuworker.plane.rank_process import run_rank


class RankThread:
    """Implements `gpuworker.plane.rank_group.Member`."""

    def __init__(self, connection: socket.socket, board: int) -> None:
        link, shared = Connection(os.dup(connection.fileno())), RankBoard(os.dup(board))
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, args=(link, shared), daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, rank: int, connection: socket.socket, board: int) -> RankThread:
        return cls(connection, board)

    def _run(self, link: Connection, board: RankBoard) -> None:
        try:
            run_rank(link, board)
        except EOFError:
            pass
        except BaseException as error:
            self.errors.append(error)
            raise
        finally:
            link.close()
            board.close()

    def ended(self) -> str:
        return ""

    def kill(self) -> None:
        raise AssertionError("no thread can be killed")

    def end(self, seconds: float) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the rank goes on"
        assert not self.errors, self.errors

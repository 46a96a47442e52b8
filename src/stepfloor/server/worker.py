"""The engine's process: requests in over one socket, pieces out, and between them the engine's loop, never waiting.

One thread. The socket is read between two steps without waiting for it, and written as far as it takes; what it does
not take is kept, so that a slow HTTP side delays no step. The process ends when the other side closes the socket.
"""

import contextlib
import heapq
import logging
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stepfloor.engine import Engine
from stepfloor.errors import QueueFullError, UserError
from stepfloor.request import Piece, Request, SamplingParams
from stepfloor.server.wire import EngineSpec, Frames, Message, decode_submit, encode, pack_piece
from stepfloor.tokenizer.tokenizer import Tokenizer
from stepfloor.weights.checkpoint import open_checkpoint

log = logging.getLogger(__name__)

STATS_EVERY_S = 0.1
COMPILING_POLL_S = 0.002
WARM_UP_TOKENS = 8


def run_engine(connection: socket.socket, spec: EngineSpec) -> None:
    """Entry point of the process."""
    # the terminal's Ctrl-C reaches both processes; this one ends when the other has drained and closes the socket
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=spec.log_level, format="%(levelname)s %(name)s: %(message)s")
    link = Link(connection)
    try:
        engine = _load(spec, link)
    except UserError as error:
        link.send({"type": "failed", "message": str(error)})
        link.drain()
        return
    with contextlib.suppress(ConnectionError):
        Worker(engine, link).run()


def _load(spec: EngineSpec, link: "Link") -> Engine:
    begin = time.monotonic()

    def on_layer(done: int, total: int) -> None:
        link.send({"type": "progress", "done": done, "total": total})

    checkpoint = open_checkpoint(spec.directory, hf_overrides=spec.hf_overrides)
    engine = Engine(checkpoint, spec.config, Tokenizer.load(spec.directory), on_layer)
    loaded = time.monotonic()
    warm_up(engine)
    report = {"load_s": loaded - begin, "warm_up_s": time.monotonic() - loaded, **engine.report()}
    link.send({"type": "ready", "report": report})
    return engine


def warm_up(engine: Engine) -> None:
    """Run prompts of every kind, then batches of 1, 2, 4, 8 ... sequences, so that no user meets a first launch."""
    config = engine.config
    tokens = min(WARM_UP_TOKENS, config.max_model_len - 1)

    def run(requests: Sequence[Request]) -> None:
        for request in requests:
            engine.submit(request)
        for piece in engine.run():
            if piece.error is not None:
                raise UserError(f"the warm-up failed: {piece.error}; check the weights")

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(i % engine.vocab_size for i in range(max(1, min(length, config.max_model_len - tokens))))

    # other kernels serve a chunk past each of these, and rows whose log-probabilities are wanted; a CPU has one kind
    lengths = (17, 81, 321, config.chunk_tokens) if config.device != "cpu" else ()
    for length in lengths:
        run([Request("warm-up", prompt(length), SamplingParams(temperature=0.0), tokens, logprobs=1)])
    count = 1
    while True:
        run(
            [
                Request(
                    f"warm-up-{i}",
                    prompt(16),
                    SamplingParams(temperature=float(i % 2), seed=i, top_p=0.9 if i % 4 == 1 else 1.0),
                    tokens,
                )
                for i in range(count)
            ]
        )
        if count == config.max_num_seqs:
            break
        count = min(2 * count, config.max_num_seqs)
    engine.reset_counters()


class Link:
    """One end of the socket, for a loop that must not wait."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._frames = Frames()
        self._unsent = bytearray()
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def send(self, message: Message) -> None:
        """Queue a message and write what the socket takes now."""
        self._unsent += encode(message)
        self._flush()

    def receive(self, wait_s: float | None) -> list[tuple[Message, Sequence[int]]]:
        """Messages that have come; waits for one up to wait_s, None for as long as it takes.

        Raises ConnectionError when the other side has closed.
        """
        if wait_s != 0:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
            self._selector.modify(self._connection, events)
            self._selector.select(wait_s)
        self._flush()
        messages: list[tuple[Message, Sequence[int]]] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                data = self._connection.recv(1 << 20)
                if not data:
                    raise ConnectionError("the HTTP process has closed the socket")
                messages += self._frames.feed(data)
        return messages

    def drain(self) -> None:
        """Write everything, waiting as long as it takes."""
        self._connection.setblocking(True)
        self._connection.sendall(self._unsent)
        self._unsent.clear()

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                sent = self._connection.send(self._unsent)
                del self._unsent[:sent]


class Worker:
    """The loop, and what it must remember of the requests it serves."""

    def __init__(self, engine: Engine, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.link = link
        self.clock = clock
        self.open: set[str] = set()
        self.deadlines: list[tuple[float, float, str]] = []  # (when, length in s, request)
        self.next_stats = 0.0
        # one thread: a grammar that is slow to compile delays other grammars and no step
        self.compilers = ThreadPoolExecutor(1, "grammar")
        self.compiling: dict[str, tuple[Future[Any], list[Request], float | None]] = {}

    def run(self) -> None:
        """Serve until the other side closes; raises ConnectionError then."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Take what has come, run one step, send what it gave; waits only where there is nothing to run."""
        busy = self.engine.has_work()
        wait = None if not self.deadlines else max(0.0, self.deadlines[0][0] - self.clock())
        wait = COMPILING_POLL_S if self.compiling else wait
        for message, ids in self.link.receive(0 if busy else wait):
            self._take(message, ids)
        self._take_compiled()
        self._expire()
        if self.engine.has_work():
            self.engine.advance()
            self._deliver()
        self._send_stats()

    def _take(self, message: Message, ids: Sequence[int]) -> None:
        kind = message["type"]
        if kind == "submit":
            self._prepare(decode_submit(message, ids), message["deadline_s"])
        elif kind == "cancel":
            for request_id in message["ids"]:
                self.compiling.pop(request_id, None)
                if request_id in self.open:
                    log.info("%s: cancelled by client, step %d", request_id, self.engine.steps)
                    self._end(request_id)
        elif kind == "profile":
            self._profile(message)
        else:
            raise RuntimeError(f"a message of unknown type {kind!r}")

    def _prepare(self, requests: list[Request], deadline_s: float | None) -> None:
        """Submit, but for a grammar only when it is compiled: that takes as long as many steps, in another thread."""
        first = requests[0]
        if first.grammar is None:
            self._submit(requests, deadline_s)
        else:
            future = self.compilers.submit(self.engine.compile_grammar, first)
            self.compiling[first.request_id] = (future, requests, deadline_s)

    def _take_compiled(self) -> None:
        done = [key for key, (future, _, _) in self.compiling.items() if future.done()]
        for key in done:
            future, requests, deadline_s = self.compiling.pop(key)
            # what went wrong with the grammar is said where it is submitted: compiling it again says the same
            future.exception()
            self._submit(requests, deadline_s)

    def _submit(self, requests: list[Request], deadline_s: float | None) -> None:
        ids = [request.request_id for request in requests]
        try:
            self.engine.check_room(len(requests))
            for request in requests:
                self.engine.submit(request)
                self.open.add(request.request_id)
        except UserError as error:
            for request_id in ids:
                if request_id in self.open:
                    self._end(request_id)
            full = isinstance(error, QueueFullError)
            self.link.send({"type": "refused", "ids": ids, "message": str(error), "full": full})
            return
        except Exception as error:
            # a fault of ours in taking one request; whoever is served already knows nothing of it
            log.exception("%s could not be taken", ids)
            for request_id in ids:
                self._end(request_id)
            message = f"the engine could not take the request: {type(error).__name__}; its log says more"
            self.link.send({"type": "refused", "ids": ids, "message": message, "full": False, "fault": True})
            return
        if deadline_s is not None:
            for request_id in ids:
                heapq.heappush(self.deadlines, (self.clock() + deadline_s, deadline_s, request_id))
        self.link.send({"type": "accepted", "ids": ids})

    def _end(self, request_id: str) -> None:
        self.open.discard(request_id)
        self.engine.cancel(request_id)

    def _expire(self) -> None:
        """End what has passed its deadline, with a piece that says so."""
        late: list[Piece] = []
        while self.deadlines and (self.deadlines[0][2] not in self.open or self.deadlines[0][0] <= self.clock()):
            _, length_s, request_id = heapq.heappop(self.deadlines)
            if request_id not in self.open:
                continue
            self._end(request_id)
            error = f"the deadline of {length_s:g} s has passed; send a longer deadline_s or a smaller max_tokens"
            log.info("%s: %s", request_id, error)
            late.append(Piece(request_id, (), (), "cancelled", error=error))
        if late:
            self.link.send({"type": "pieces", "pieces": [pack_piece(piece) for piece in late]})

    def _deliver(self) -> None:
        pieces = self.engine.pieces
        joined = self.engine.joined
        if not pieces and not joined:
            return
        packed = []
        while pieces:
            piece = pieces.popleft()
            if piece.finish_reason is not None:
                self.open.discard(piece.request_id)
                if piece.error is not None:
                    log.error("%s: %s", piece.request_id, piece.error)
            packed.append(pack_piece(piece))
        self.link.send({"type": "pieces", "pieces": packed, **({"joined": joined} if joined else {})})

    def _send_stats(self) -> None:
        now = self.clock()
        if now < self.next_stats and self.engine.has_work():
            return
        self.next_stats = now + STATS_EVERY_S
        self.link.send({"type": "stats", **self.engine.stats()})

    def _profile(self, message: Message) -> None:
        answer: Message = {"type": "profiled", "error": None}
        try:
            if message["start"]:
                self.engine.start_profile()
            else:
                answer["path"] = str(self.engine.stop_profile(Path(message["directory"])))
        except UserError as error:
            answer["error"] = str(error)
        self.link.send(answer)

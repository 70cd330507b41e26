"""What runs inside a sandbox between an interpreter's arrival there and its end: requests, and the answers to them.

Text that any Python from 3.9 on runs: the template interpreter loads it, and nothing of nsbox is imported here. A
request is JSON: code, or a pickled call. Pickles only go in; an answer is JSON, of which the host believes nothing.
"""

from __future__ import annotations

import _socket
import ast
import binascii
import builtins
import json
import linecache
import os
import pickle
import struct
import sys
import traceback
import types
from typing import Any

Data = dict[str, Any]

WIRED = 4096  # bytes of a rehearsed request or answer that go over a socket
ANSWER = 3  # the socket where it is asked
HEAD = struct.Struct("=Q")  # length of what follows, both ways
FILE = "<code>"


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def describe(error: BaseException) -> Data:
    """An exception as data; the frames are those of the code that was sent."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(error), error, trace))
    except Exception:
        text = ""
    try:
        message = str(error)
    except Exception:
        message = ""
    return {"type": type(error).__qualname__, "module": type(error).__module__, "message": message, "traceback": text}


def plain(value: Any) -> Any:
    """For json: what numpy has and JSON could have."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__qualname__} is not JSON")


def split(code: str) -> tuple[types.CodeType, types.CodeType | None]:
    """(code object of the statements, code object of the last expression or None)."""
    tree = ast.parse(code, FILE)
    last = None
    end = tree.body[-1] if tree.body else None
    if isinstance(end, ast.Expr):
        tree.body.pop()
        last = compile(ast.Expression(end.value), FILE, "eval")
    return compile(tree, FILE, "exec"), last


def put_files(files: dict[str, str]) -> None:
    for path, data in files.items():
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(binascii.a2b_base64(data))


def fresh_main() -> Data:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main.__dict__


def run_code(request: Data, names: Data) -> Data:
    names.update(request.get("inputs") or {})
    code = request["code"]
    linecache.cache[FILE] = (len(code), None, code.splitlines(True), FILE)
    body, last = split(code)
    exec(body, names)
    value = None if last is None else eval(last, names)
    try:
        return {"value": json.loads(json.dumps(value, default=plain)) if value is not None else None}
    except (TypeError, ValueError, RecursionError) as error:
        return {"value_error": f"the value of type {type(value).__qualname__} is not JSON: {error}"}


def run_call(request: Data) -> Data:
    function, args, kwargs = pickle.loads(binascii.a2b_base64(request["call"]))
    value = function(*args, **kwargs)
    try:
        return {"value": tagged(value)}
    except (TypeError, ValueError, RecursionError) as error:
        return {"value_error": f"the result cannot come back: {error}"}


def tagged(value: Any) -> Any:
    """Data as JSON that keeps its types; see nsbox.executor. Raises TypeError for anything that is not data."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple, set, frozenset):
        return {kind.__name__: [tagged(item) for item in value]}
    if kind is dict:
        return {"dict": [[tagged(key), tagged(item)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {"bytes": binascii.b2a_base64(value, newline=False).decode()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind.__module__ == "numpy":
        return tagged_array(value)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} is not plain data; return lists, dicts, text, numbers")


def tagged_array(value: Any) -> Any:
    import io

    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return tagged(value.item()) if type(value.item()).__module__ == "builtins" else {"str": str(value)}
    file = io.BytesIO()
    numpy.save(file, value, allow_pickle=False)
    return {"numpy": binascii.b2a_base64(file.getvalue(), newline=False).decode()}


def execute(request: Data, names: Data) -> Data:
    """Run a request; the answer is data for JSON."""
    answer: Data = {}
    try:
        try:
            put_files(request.get("files") or {})
            answer = run_call(request) if "call" in request else run_code(request, names)
        except SystemExit as error:
            status = error.code
            if status is not None and not isinstance(status, int):
                print(status, file=sys.stderr)
                status = 1
            answer = {"exit": (status or 0) & 255}
    except BaseException as error:
        answer = {"exception": describe(error)}
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    return answer


def receive(fd: int, rest: bytearray) -> bytes | None:
    """One request as text, None at the end; what came behind it stays in ``rest``."""
    while len(rest) < HEAD.size or len(rest) < HEAD.size + HEAD.unpack_from(rest)[0]:
        more = os.read(fd, 1 << 16)  # malloc(3) maps nothing anew for so little
        if not more:
            return None
        rest += more
    end = HEAD.size + HEAD.unpack_from(rest)[0]
    text = bytes(rest[HEAD.size : end])
    del rest[:end]
    return text


def reply(fd: int, answer: Data, most: int) -> None:
    data = json.dumps(answer).encode("utf-8", "surrogatepass")
    if len(data) > most:
        short = {"value_error": f"the value is {len(data)} bytes as JSON; {most} may come back"}
        short.update((key, answer[key]) for key in ("exit",) if key in answer)
        data = json.dumps(short).encode()
    write_all(fd, HEAD.pack(len(data)) + data)


def answer_one(fd: int, rest: bytearray, names: Data | None, most: int) -> tuple[Data | None, Data]:
    """One request and its answer: (the variables that are kept, None at the end; what was answered)."""
    text = receive(fd, rest)
    if text is None:
        return None, {}
    request = json.loads(text)
    if names is None or not request.get("keep"):
        names = fresh_main()
    if request.get("env"):
        os.environ.update(request["env"])
    answer = execute(request, names)
    reply(fd, answer, most)
    return names, answer


def serve(most: int) -> None:
    """Answer requests until nobody asks any more. Each ends the variables of the one before, unless they are kept."""
    names, rest = None, bytearray()
    while True:
        names, _ = answer_one(ANSWER, rest, names, most)
        if names is None:
            return


def rehearse(requests: list[Data]) -> list[Data]:
    """The whole way of requests and answers, before anybody waits for it: what a fork touches for the first time is
    copied, page by page. The answers."""
    answers = []
    for request in requests:
        here, there = _socket.socketpair()
        data = json.dumps(request).encode()
        rest = bytearray(HEAD.pack(len(data)) + data)
        if len(rest) <= WIRED:  # nobody reads at the other end meanwhile: more could wait for ever
            there.sendall(rest)
            rest.clear()
        answers.append(answer_one(here.fileno(), rest, None, WIRED)[1])
        here.close()
        there.close()
    return answers

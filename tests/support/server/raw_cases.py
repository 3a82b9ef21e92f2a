"""Bytes that clients send, well-formed or not, for servers that must all treat them alike."""

from __future__ import annotations

import json
from typing import Final

#: What follows a case on its connection, if that is still open.
FOLLOWING: Final = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

_BODY: Final = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
_LENGTH: Final = b"Content-Length: %d" % len(_BODY)
_CHUNKED: Final = b"Transfer-Encoding: chunked"
_CHUNK: Final = b"%x\r\n%b\r\n" % (len(_BODY), _BODY)
_LAST: Final = b"0\r\n\r\n"
_TLS: Final = bytes.fromhex("1603010200010001fc0303") + b"\x5a" * 60


def _get(line: bytes, *headers: bytes, host: bytes = b"Host: x") -> bytes:
    return b"\r\n".join((line, *((host,) if host else ()), *headers, b"", b""))


def _post(*headers: bytes, body: bytes = b"", line: bytes = b"POST /generate HTTP/1.1") -> bytes:
    return _get(line, *headers) + body


_VERSION: Final = _get(b"GET /version HTTP/1.1")
_WHOLE: Final = _post(_LENGTH, body=_BODY)
#: Numbers of the live view that no request has: of one replica, and of another.
_HOMES: Final = (256_000, 256_001, 256_000)

#: Request lines; a Host follows.
_LINES: Final = (
    b"GET /version HTTP/1.1",
    b"GET /version HTTP/1.0",
    b"GET /version HTTP/0.9",
    b"GET /version HTTP/1.2",
    b"GET /version HTTP/1.10",
    b"GET /version HTTP/2.0",
    b"GET /version HTTP/9.9",
    b"GET /version http/1.1",
    b"GET /version HTTP/1.1 ",
    b"GET /version HTTP/1.1 x",
    b"GET /version HTTP",
    b"GET /version",
    b"GET  /version HTTP/1.1",
    b"GET\t/version HTTP/1.1",
    b" GET /version HTTP/1.1",
    b"get /version HTTP/1.1",
    b"GETX /version HTTP/1.1",
    b"BREW /version HTTP/1.1",
    b"PROPFIND /version HTTP/1.1",
    b"CONNECT x:80 HTTP/1.1",
    b"TRACE /version HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"OPTIONS /version HTTP/1.1",
    b"HEAD /version HTTP/1.1",
    b"GET version HTTP/1.1",
    b"GET * HTTP/1.1",
    b"GET http://x/version HTTP/1.1",
    b"GET HTTP://y:80/version HTTP/1.1",
    b"GET https://x/version HTTP/1.1",
    b"GET http://x HTTP/1.1",
    b"GET ftp://x/version HTTP/1.1",
    b"GET x:80 HTTP/1.1",
    b"GET /%76ersion HTTP/1.1",
    b"GET %2fversion HTTP/1.1",
    b"GET /%zz HTTP/1.1",
    b"GET //version HTTP/1.1",
    b"GET ///x/version HTTP/1.1",
    b"GET /version/ HTTP/1.1",
    b"GET /./version HTTP/1.1",
    b"GET /a/../version HTTP/1.1",
    b"GET /version;x HTTP/1.1",
    b"GET /version?a=b&c HTTP/1.1",
    b"GET /version#a HTTP/1.1",
    b"GET /version\0 HTTP/1.1",
    b"GET /ver sion HTTP/1.1",
    b"GET /versi\xc3\xb6n HTTP/1.1",
    b"GET /version\xff HTTP/1.1",
    b"GET /version\r HTTP/1.1",
    b"GET /" + b"x" * 8000 + b" HTTP/1.1",
    b"GET /" + b"x" * 9000 + b" HTTP/1.1",
    b"GET /" + b"x" * 90_000 + b" HTTP/1.1",
    b"HTTP/2.0 /version",
    b"HTTP/1.1 200 OK",
)
#: Paths that are about all replicas, and methods for them.
_OF_ALL: Final = (
    b"GET /health",
    b"HEAD /health",
    b"POST /health",
    b"OPTIONS /health",
    b"DELETE /health",
    b"GET /%68ealth",
    b"GET http://x/health",
    b"GET //health",
    b"GET /health?x=1",
    b"GET /health/",
    b"GET /ping",
    b"GET /ready",
    b"HEAD /ready",
    b"PUT /ready",
    b"GET /load",
    b"GET /lo%61d",
    b"GET /metrics",
    b"HEAD /metrics",
    b"POST /metrics",
    b"GET /%6Detrics",
    b"GET /live",
    b"GET /live/256000/trace",
    b"GET /live/1",
    b"GET /live/x/trace",
    b"GET /live/99999999999999999999/trace",
    b"POST /live/256001/abort",
    b"POST /admin/reload",
    b"GET /v1/requests/x/trace",
    b"GET /v1/requests/a%2Fb%0d%0a/trace",
    b"POST /v1/requests/%FF/abort",
    b"DELETE /v1/responses/resp_" + b"0" * 32,
    b"GET /v1/responses/resp_" + b"0" * 30 + b"01",
    b"GET /v1/responses/resp_" + b"f" * 32,
    b"POST /v1/responses/x/cancel",
)
#: Header lines of ``GET /version``.
_HEADERS: Final = (
    b"Host: y",
    b"Expect: \xf4",
    b"Host : y",
    b"NoColon",
    b": empty",
    b"A : b",
    b" A: b",
    b"A: b\r\n c",
    b"A: b\r\n\tc",
    b"A:",
    b"A: \0",
    b"A: \x01",
    b"A: \x7f",
    b"A: \xe9",
    b"A: b\nC: d",
    b"A: b\rC: d",
    b"\xe9: b",
    b"A(B): c",
    b"A_B: c",
    b"A: " + b"x" * 8180,
    b"A: " + b"x" * 9000,
    b"A: " + b"x" * 100_000,
    b"B" * 9000 + b": x",
    b"\r\n".join(b"A%d: b" % i for i in range(98)),
    b"\r\n".join(b"A%d: b" % i for i in range(101)),
    b"\r\n".join(b"A%d: %b" % (i, b"x" * 1000) for i in range(60)),
    b"\r\n".join(b"A%d: %b" % (i, b"x" * 1000) for i in range(300)),
    b"User-Agent: a\r\nUser-Agent: b",
    b"Content-Type: a\r\nContent-Type: a",
    b"Connection: close",
    b"Connection: keep-alive",
    b"Connection: keep-alive, close",
    b"Connection: close\r\nConnection: keep-alive",
    b"Connection: x",
    b"Proxy-Connection: close",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
    b"Connection: Upgrade\r\nUpgrade: websocket",
    b"Upgrade: websocket",
    b"Sec-WebSocket-Key1: x",
    b"Expect: 100-continue",
    b"Expect: x",
    b"TE: trailers",
    b"Content-Length: 0",
    b"Content-Length: 3",
    b"Transfer-Encoding: identity",
)
#: Headers and body of ``POST /generate``.
_FRAMED: Final = (
    (_LENGTH, _BODY),
    (_LENGTH, _BODY[:-3]),
    (_LENGTH, _BODY + b"xyz"),
    (_LENGTH, _BODY + _VERSION),
    (_LENGTH.lower(), _BODY),
    (_LENGTH + b"\r\n" + _LENGTH, _BODY),
    (_LENGTH + b"\r\nContent-Length: 3", _BODY),
    (_LENGTH.replace(b": ", b" : "), _BODY),
    (_LENGTH.replace(b": ", b":\t "), _BODY),
    (_LENGTH.replace(b": ", b": +"), _BODY),
    (_LENGTH.replace(b": ", b": 00"), _BODY),
    (_LENGTH + b" ", _BODY),
    (_LENGTH + b", 3", _BODY),
    (_LENGTH.replace(b"Content-Length", b"Content_Length"), _BODY),
    (b"Content-Length: -1", b""),
    (b"Content-Length: 0x10", b"x" * 16),
    (b"Content-Length: 99999999999999999999", b""),
    (b"Content-Length: 999999999", b""),
    (b"Content-Length: 999999999", b"{"),
    (b"Content-Length: 1e3", b""),
    (b"Content-Length:", b""),
    (_CHUNKED, _CHUNK + _LAST),
    (_CHUNKED.upper(), _CHUNK + _LAST),
    (_CHUNKED, _CHUNK + _LAST + _VERSION),
    (_CHUNKED, _CHUNK + _LAST + b"GET /ver"),
    (_CHUNKED, _CHUNK + _LAST + b"\r\n\r\n"),
    (_CHUNKED, _CHUNK),
    (_CHUNKED, _CHUNK.replace(b"\r\n", b";a=b\r\n", 1) + _LAST),
    (_CHUNKED, _CHUNK.replace(b"\r\n", b" \r\n", 1) + _LAST),
    (_CHUNKED, b"0" * 20 + _CHUNK + _LAST),
    (_CHUNKED, _CHUNK.replace(b"\r\n", b"\n") + b"0\n\n"),
    (_CHUNKED, _CHUNK[:-2] + _LAST),
    (_CHUNKED, b"xyz\r\n"),
    (_CHUNKED, b"-1\r\n"),
    (_CHUNKED, b"0x5\r\nabcde\r\n" + _LAST),
    (_CHUNKED, b"FFFFFFFFFFFFFFFFF\r\n"),
    (_CHUNKED, b"1;" + b"x" * 20_000 + b"\r\na\r\n" + _LAST),
    (_CHUNKED, _CHUNK + b"0\r\nA: b\r\n\r\n"),
    (_CHUNKED, _CHUNK + b"0\r\nbad trailer\r\n\r\n"),
    (_CHUNKED + b"\r\n" + _LENGTH, _CHUNK + _LAST),
    (_LENGTH + b"\r\n" + _CHUNKED, _BODY),
    (b"Content-Length: 5\r\n" + _CHUNKED, _LAST + _VERSION),
    (b"Content-Length: 4\r\n" + _CHUNKED, b"5c\r\nGPOST / HTTP/1.1\r\n" + _LAST),
    (_CHUNKED + b"\r\n" + _CHUNKED, _CHUNK + _LAST),
    (_CHUNKED + b", identity", _CHUNK + _LAST),
    (_CHUNKED.replace(b": ", b":\x0b"), _CHUNK + _LAST),
    (_CHUNKED.replace(b": ", b" : "), _CHUNK + _LAST),
    (b"X: y\r\n " + _CHUNKED, _CHUNK + _LAST),
    (b"Transfer-Encoding: xchunked", _CHUNK + _LAST),
    (b"Transfer-Encoding: gzip", _BODY),
    (b"Transfer-Encoding: gzip, chunked", _CHUNK + _LAST),
    (b"Transfer-Encoding: chunked, gzip", _CHUNK + _LAST),
    (b"Content-Encoding: gzip\r\n" + _LENGTH, _BODY),
    (b"Content-Encoding: x\r\n" + _LENGTH, _BODY),
    (b"Expect: 100-continue\r\n" + _LENGTH, _BODY),
    (b"Expect: 100-continue\r\n" + _CHUNKED, _CHUNK + _LAST),
    (b"Connection: close\r\n" + _LENGTH, _BODY + _VERSION),
    (b"", _BODY),
)
#: What is no request at all, or several.
_STREAMS: Final = (
    _TLS,
    b"\x80\x2e\x01\x03\x01" + b"\0" * 40,
    b"SSH-2.0-OpenSSH_9.9\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000"),
    b"PRI * HTTP/2.0\r\n\r\n",
    b"RTSP/1.0 OPTIONS *\r\n\r\n",
    b"EHLO x\r\n",
    b"\r\n",
    b"\r\n\r\n" + _VERSION,
    b"\n" + _VERSION,
    b"\0" * 1000,
    b"\0" * 1000 + b"\r\n\r\n",
    b"\xff\xfe",
    b"{}\r\n\r\n",
    b"A" * 100,
    b"A" * 100_000,
    b"G",
    b"GET /version HTTP/1.1",
    b"GET /version HTTP/1.1\r\n",
    b"GET /version HTTP/1.1\r\nHost: x\r\n",
    b"GET /version HTTP/1.1\r\nHost: x\r\nA",
    b"GET /version HTTP/3",
    b"POST /generate HTTP/1.1\r\nHost: x\r\nbad header\r\n",
    b"GET /version HTTP/1.1\nHost: x\n\n",
    b"GET /version HTTP/1.1\r\nHost: x\n\r\n",
    b"GET /version HTTP/1.1\r\nHost: x\r\n\n",
    b"GET /version HTTP/1.1\r\nHost: x\r\r\n\r\n",
    _get(b"GET /version HTTP/1.1", host=b""),
    _get(b"GET /health HTTP/1.1", host=b""),
    _get(b"GET /health HTTP/1.0", host=b""),
    _get(b"GET /version HTTP/1.0", b"Connection: keep-alive"),
    _get(b"GET /health HTTP/1.0", b"Connection: keep-alive"),
    _get(b"GET /health HTTP/2.0"),
    _get(b"GET /health HTTP/1.1", b"Connection: close") + _VERSION,
    _get(b"GET /health HTTP/1.1") * 3,
    _get(b"GET /health HTTP/1.1") + b"GARBAGE\r\n\r\n",
    _get(b"GET /health HTTP/1.1", b"Content-Length: 3") + b"abc",
    _get(b"GET /health HTTP/1.1", b"Content-Length: 3"),
    _get(b"GET /health HTTP/1.1", _CHUNKED) + _LAST,
    _get(b"GET /health HTTP/1.1", host=b"Host: "),
    _get(b"GET /health HTTP/1.1", host=b"Host: a b"),
    _get(b"GET /health HTTP/1.1", host=b"Host: a/b@c"),
    _get(b"POST /live/256000/abort HTTP/1.1", _LENGTH) + _BODY,
    _get(b"POST /live/256000/abort HTTP/1.1", _LENGTH),
    _get(b"POST /live/256000/abort HTTP/1.1", _CHUNKED) + _CHUNK + _LAST,
    _get(b"POST /v1/requests/x/abort HTTP/1.1", b"Expect: 100-continue", _LENGTH) + _BODY,
    _VERSION * 2,
    _VERSION * 40,
    _WHOLE * 3,
    _WHOLE + _get(b"GET /health HTTP/1.1") + _WHOLE,
    _VERSION + b"\r\n" + _VERSION,
    _VERSION + b"x",
    _VERSION + _TLS,
    _get(b"GET /v1/requests/x/trace HTTP/1.1") + _VERSION,
    _get(b"GET /live/256001/trace HTTP/1.1") * 2 + _VERSION,
    _get(b"HEAD /metrics HTTP/1.1") + _VERSION,
    # What one of two replicas has, before and after what any has.
    _get(b"GET /l%69ve/256000/trace HTTP/1.1") + _VERSION,
    _get(b"GET /l%69ve/256001/trace HTTP/1.1") + _VERSION,
    _VERSION + b"".join(_get(b"GET /live/%d/trace HTTP/1.1" % i) for i in _HOMES) + _VERSION,
    b"".join(_get(b"POST /live/%d/abort HTTP/1.1" % i, _CHUNKED) + _LAST for i in _HOMES) + _WHOLE,
    b"".join(_get(b"GET /v1/responses/resp_%032x HTTP/1.1" % i) + _WHOLE for i in (0, 1)),
    _post(_CHUNKED, body=_CHUNK + b"0\r\nA: b\r\n\r\n") * 2
    + _get(b"DELETE /v1/responses/resp_%032x HTTP/1.1" % 1)
    + _get(b"DELETE /v1/responses/resp_%032x HTTP/1.1" % 0)
    + _get(b"GET /health HTTP/1.1")
    + _VERSION,
    b"\r\n" + _get(b"GET /live/256001/trace HTTP/1.1", b"Connection: close") + _VERSION,
    b"".join(_get(b"GET /live/%d/trace HTTP/1.0" % i, b"Connection: keep-alive") for i in _HOMES),
)
#: Pieces, between which a moment passes.
_PIECES: Final = (
    tuple(bytes([byte]) for byte in _VERSION),
    tuple(bytes([byte]) for byte in _get(b"GET /health HTTP/1.1")),
    (_VERSION[:10], _VERSION[10:]),
    (_VERSION, _VERSION),
    (_get(b"GET /health HTTP/1.1"), _TLS),
    (_get(b"GET /health HTTP/1.1"), _VERSION, b"x"),
    (_WHOLE[:-5], _WHOLE[-5:]),
    (_WHOLE[:-5], _WHOLE[-5:] + _VERSION),
    (_WHOLE[:20], _WHOLE[20:60], _WHOLE[60:]),
    (b"GET /version HTTP/1.1\r\nHost: x\r\nA: ", *(b"x" * 1000,) * 12),
    (b"GET /version HTTP/1.1\r\n", *(b"A%d: b\r\n" % i for i in range(110)), b"\r\n"),
    (b"GET /version HTTP/1.1\r\nHost: x\r\nbad", b" header\r\n"),
    (b"GET ", b"\x01"),
    (b"\x16", b"\x01"),
    (_post(b"Expect: 100-continue", _LENGTH), _BODY),
    (_post(_CHUNKED), _CHUNK[:5], _CHUNK[5:], _LAST),
    (_WHOLE, *(_get(b"GET /live/%d/trace HTTP/1.1" % i) for i in _HOMES), _VERSION),
    (_get(b"GET /l%69ve/256001/trace HTTP/1.1") + _VERSION[:20], _VERSION[20:], _VERSION),
    (_get(b"GET /l%69ve/256000/trace HTTP/1.1") + _VERSION[:20], _VERSION[20:], _VERSION),
)
#: After these, the client closes its side.
_ENDED: Final = (
    b"",
    b"G",
    b"GET /version HTTP/1.1\r\nHost: x\r\n",
    b"GET /version HTTP/1.1\r\nbad header\r\n",
    b"BAD\r\n",
    _VERSION,
    _VERSION + b"GET /",
    _VERSION * 2,
    _get(b"GET /health HTTP/1.1"),
    _get(b"GET /metrics HTTP/1.1"),
    _WHOLE,
    _WHOLE[:-4],
    _post(_CHUNKED, body=_CHUNK + _LAST),
    _post(_CHUNKED, body=_CHUNK),
    _TLS,
    *(_post(b"Content-Length: %d" % length, body=_BODY) for length in (10**6, 9 * 10**6, 10**12)),
    _WHOLE + _post(b"Content-Length: 8388609", body=b"{"),
    _post(_CHUNKED, body=b"900000\r\n" + b"x" * 100),
    _post(b"Content-Length: 30", line=b"POST /v1/chat/completions HTTP/1.1"),
    _post(b"Content-Length: 30", body=b"{", line=b"POST /nothing HTTP/1.1"),
    _post(b"Content-Length: 30", b"Content-Encoding: rot13", body=b"{"),
)


def _named() -> dict[str, tuple[bytes, ...]]:
    found: dict[str, tuple[bytes, ...]] = {}
    for line in _LINES:
        found[f"line {line!r:.60}"] = (_get(line),)
    for start in _OF_ALL:
        found[f"of all {start!r:.60}"] = (_get(start + b" HTTP/1.1"),)
    for header in _HEADERS:
        found[f"header {header!r:.60} {len(header)}"] = (_get(b"GET /version HTTP/1.1", header),)
    for headers, body in _FRAMED:
        found[f"body {headers!r:.60} {body!r:.40} {len(body)}"] = (_post(headers, body=body),)
    for stream in _STREAMS:
        found[f"stream {stream!r:.70} {len(stream)}"] = (stream,)
    for i, pieces in enumerate(_PIECES):
        found[f"pieces {i} {pieces[0]!r:.40}"] = pieces
    for data in _ENDED:
        found[f"ended {data!r:.40} {len(data)}"] = (data, b"") if data else (b"",)
    return found


#: Pieces by name. An empty last piece: then the client closes its side.
CASES: Final = _named()

"""Formats of strings as patterns: every match has the format.

Rare texts of a format do not match: leap seconds, quoted local parts and address literals in e-mail
addresses, IPv6 zone ids. https://json-schema.org/draft/2020-12, validation, section 7.3.
"""

from __future__ import annotations

from collections.abc import Mapping

_MONTH_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    r"|02-(?:0[1-9]|1\d|2[0-8]))"
)
# From the year 1 on: many libraries have no year 0.
_DATE = (
    rf"(?:(?:\d{{3}}[1-9]|\d\d[1-9]\d|\d[1-9]\d\d|[1-9]\d{{3}})-{_MONTH_DAY}"
    rf"|(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+\-](?:[01]\d|2[0-3]):[0-5]\d)"
_DURATION_TIME = r"T(?:\d{1,9}H(?:\d{1,9}M(?:\d{1,9}S)?)?|\d{1,9}M(?:\d{1,9}S)?|\d{1,9}S)"
_DURATION_DATE = r"(?:\d{1,9}Y(?:\d{1,9}M(?:\d{1,9}D)?)?|\d{1,9}M(?:\d{1,9}D)?|\d{1,9}D)"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9]|-[A-Za-z0-9]){0,31}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]{1,20}"
# Letters that domain names allow, of scripts written from left to right: Latin, Greek, Cyrillic,
# Japanese, Chinese, Korean. Twelve of them stay below the limit when encoded.
_LETTERS = (
    r"\u{DF}-\u{F6}\u{F8}-\u{FF}\u{3B1}-\u{3C1}\u{3C3}-\u{3C9}\u{430}-\u{45F}\u{3041}-\u{3096}"
    r"\u{30A1}-\u{30FA}\u{4E00}-\u{9FA5}\u{AC00}-\u{D7A3}"
)
_IDN_LABEL = rf"(?:[a-z0-9](?:[a-z0-9]|-[a-z0-9]){{0,31}}|[a-z{_LETTERS}]{{1,12}})"
_IDN_HOST = rf"{_IDN_LABEL}(?:\.{_IDN_LABEL}){{0,3}}"
_HEX16 = r"[0-9A-Fa-f]{1,4}"
_UNRESERVED = r"A-Za-z0-9\-._~"
_SUB = r"!$&'()*+,;="
_PERCENT = r"%[0-9A-Fa-f]{2}"
_WIDE = r"\u{A1}-\u{167F}\u{1681}-\u{1FFF}\u{2030}-\u{205E}\u{2070}-\u{2FFF}\u{3001}-\u{D7FF}"


def _resource(wide: str, *, reference: bool) -> str:
    """URIs with authority or opaque; ``wide``: characters beyond ASCII, for IRIs."""
    char = rf"(?:[{_UNRESERVED}{_SUB}:@{wide}]|{_PERCENT})"
    segment_1 = rf"(?:[{_UNRESERVED}{_SUB}@{wide}]|{_PERCENT})+"
    user = rf"(?:(?:[{_UNRESERVED}{_SUB}:{wide}]|{_PERCENT})*@)?"
    host = rf"(?:(?:[{_UNRESERVED}{wide}]|{_PERCENT})+|\[{_IPV6_FULL}\])"
    authority = rf"//{user}{host}(?::\d{{1,5}})?(?:/{char}*)*"
    tail = rf"(?:\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    absolute = rf"/(?:{char}+(?:/{char}*)*)?"
    uri = rf"[A-Za-z][A-Za-z0-9+.\-]*:(?:{authority}|{absolute}|{char}+(?:/{char}*)*){tail}"
    if not reference:
        return f"^{uri}$"
    relative = rf"(?:{authority}|{absolute}|{segment_1}(?:/{char}*)*)?{tail}"
    return f"^(?:{uri}|{relative})$"


def _ipv6() -> str:
    full = rf"{_HEX16}(?::{_HEX16}){{7}}"
    options = [full, rf"{_HEX16}(?::{_HEX16}){{5}}:{_IPV4}", rf"::(?:{_HEX16}:){{0,5}}{_IPV4}"]
    for before in range(7):
        left = rf"(?:{_HEX16}(?::{_HEX16}){{{before - 1}}})" if before else ""
        options.append(rf"{left}::(?:{_HEX16}(?::{_HEX16}){{0,{6 - before}}})?")
    return rf"(?:{'|'.join(options)}|{_HEX16}(?::{_HEX16}){{6}}::)"


def _regex(depth: int) -> str:
    """Regular expressions for ECMA 262 and other dialects, with groups up to a depth."""
    atom = (
        r"(?:[^\\^$.*+?()\[\]{}|/\u{0}-\u{1F}]|\.|\\[dDwWsStnr.^$*+?()\[\]{}|/\\]"
        r"|\[\^?(?:[^\\\[\]\-^&~|\u{0}-\u{1F}]|[a-y]-z|[A-Y]-Z|[0-8]-9|\\[dDwWsS\[\]\\^\-])+\]"
    )
    atom += rf"|\((?:\?:)?{_regex(depth - 1)}\))" if depth else ")"
    term = rf"{atom}(?:(?:[*+?]|\{{[1-9]\d?(?:,|,[1-9]\d\d)?\}})\??)?"
    sequence = rf"\^?(?:{term})*\$?"
    return rf"{sequence}(?:\|{sequence}){{0,20}}"


_IPV6_FULL = rf"{_HEX16}(?::{_HEX16}){{7}}"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

#: Formats that are enforced.
PATTERNS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": rf"^P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|\d{{1,9}}W)$",
    "email": rf"^{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOST}$",
    "idn-email": rf"^(?:{_ATOM}(?:\.{_ATOM}){{0,2}}|[{_LETTERS}]{{1,12}})@{_IDN_HOST}$",
    "idn-hostname": f"^{_IDN_HOST}$",
    "regex": f"^{_regex(2)}$",
    "hostname": rf"^{_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^{_ipv6()}$",
    "uri": _resource("", reference=False),
    "uri-reference": _resource("", reference=True),
    "iri": _resource(_WIDE, reference=False),
    "iri-reference": _resource(_WIDE, reference=True),
    "uri-template": (
        rf"^(?:[{_UNRESERVED}!$&()*+,;=:@/?#\[\]]|{_PERCENT}"
        r"|\{[+#./;?&]?[A-Za-z0-9_]{1,20}(?:\*|:[1-9]\d{0,3})?"
        r"(?:,[A-Za-z0-9_]{1,20}(?:\*|:[1-9]\d{0,3})?)*\})*$"
    ),
    "uuid": r"^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9]\d?)(?:#|{_POINTER})$",
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}

#: Formats of OpenAPI: of integers, the least and the largest.
INTEGERS: Mapping[str, tuple[int, int]] = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
#: Formats that limit no string.
WITHOUT_MEANING = frozenset({"password", "binary", "float", "double", *INTEGERS})

"""Bytes that are almost right: cut, changed, repeated. Pure noise is rejected at its first byte and tests little."""

from __future__ import annotations

from hypothesis import strategies as st


@st.composite
def damaged(draw: st.DrawFn, contents: st.SearchStrategy[bytes]) -> bytes:
    """Return one of the contents after up to four accidents."""
    content = bytearray(draw(contents))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        match draw(st.sampled_from(["cut", "change", "insert", "repeat", "remove"])):
            case "cut":
                del content[at:]
            case "change":
                content[at : at + 1] = draw(st.sampled_from([b"\0", b"\x7f", b"\x80", b"\xff"]) | st.binary(min_size=1))
            case "insert":
                content[at:at] = draw(st.binary(max_size=12))
            case "repeat":
                content[at:at] = content[at : at + draw(st.integers(1, 40))] * draw(st.integers(1, 5))
            case "remove":
                del content[at : at + draw(st.integers(1, 8))]
    return bytes(content)

from __future__ import annotations

import pytest

from tests.msl.declarations import Parameter, SourceError, Variable, group_declarations, kernels
from tests.msl.lexer import Edit, edited, tokens
from tests.msl.translate import float_literal, translated

KERNEL = "[[kernel]] void f(device float* out [[buffer(0)]]) {{\n{body}\n}}\n"


def texts(source: str) -> list[str]:
    return [token.text for token in tokens(source)]


def test_tokens_leave_comments_and_space_out() -> None:
    assert texts("a /* b\n */ += c; // d\n[[e]]") == ["a", "+=", "c", ";", "[[", "e", "]]"]


def test_tokens_know_their_line() -> None:
    assert [(token.text, token.line) for token in tokens("a\n\n/* x\n */ b")] == [("a", 1), ("b", 4)]


def test_an_edit_keeps_the_numbers_of_lines() -> None:
    source = "one\ntwo\nthree\nfour"
    result = edited(source, [Edit(source.index("two"), source.index("three"), "2 ")])
    assert result.split("\n")[2:] == ["three", "four"]


@pytest.mark.parametrize(
    ("metal", "cpp"),
    [
        ("1.0", "1.0f"),
        ("1.", "1.f"),
        (".5", ".5f"),
        ("1e-3", "1e-3f"),
        ("1.5e3", "1.5e3f"),
        ("1.0h", "half(1.0f)"),
        ("2h", "half(2.f)"),
        ("1.0bf", "bfloat(1.0f)"),
        ("1.0f", None),
        ("12", None),
        ("12u", None),
        ("0x1e3", None),
    ],
)
def test_fractions_are_floats(metal: str, cpp: str | None) -> None:
    assert float_literal(metal) == cpp


@pytest.mark.parametrize(
    ("declaration", "variables"),
    [
        ("threadgroup float s;", [Variable("float", "s", "")]),
        (
            "threadgroup float s[4], t[N * 2];",
            [Variable("float", "s", "[4]"), Variable("float", "t", "[N * 2]")],
        ),
        ("threadgroup T s[BM * LD];", [Variable("T", "s", "[BM * LD]")]),
        ("threadgroup float s[4][8 + 1];", [Variable("float", "s", "[4][8 + 1]")]),
        ("threadgroup vec<T, 4> s[2];", [Variable("vec<T, 4>", "s", "[2]")]),
        ("threadgroup atomic_uint n;", [Variable("atomic_uint", "n", "")]),
        ("threadgroup metal::atomic<int> n[3];", [Variable("metal::atomic<int>", "n", "[3]")]),
        ("threadgroup float* p = s;", []),
        ("threadgroup float& r = s[0];", []),
        ("auto p = (threadgroup float4*)q;", []),
        ("const threadgroup float* p = q;", []),
        ("int add(int by) const threadgroup { return 0; }", []),
    ],
)
def test_threadgroup_variables_are_told_from_pointers(declaration: str, variables: list[Variable]) -> None:
    found = group_declarations("int a;\n" + declaration)
    assert [variable for one in found for variable in one.variables] == variables


@pytest.mark.parametrize(
    "declaration", ["threadgroup float s[2] = {1.0f};", "static threadgroup float s[2];"]
)
def test_threadgroup_variables_that_metal_does_not_have_are_refused(declaration: str) -> None:
    with pytest.raises(SourceError, match="line 2: threadgroup"):
        group_declarations("int a;\n" + declaration)


@pytest.mark.parametrize(
    "head", ["[[kernel]] void", "kernel void", "[[kernel, max_total_threads_per_threadgroup(64)]] void"]
)
def test_kernels_and_their_parameters_are_found(head: str) -> None:
    source = (
        f"void g(int a) {{}}\n{head} f(const device float* x [[buffer(0)]], const constant int& n [[buffer(1)]],\n"
        "uint3 at [[thread_position_in_grid]]) {}"
    )
    parameters = (Parameter(None, True), Parameter(None, False), Parameter("thread_position_in_grid", False))
    assert kernels(source) == {"f": parameters}


def test_translation_keeps_lines() -> None:
    body = "  threadgroup float s[4],\n    t[2];\n  s[0] = 1.0;"
    result = translated(KERNEL.format(body=body), "f", "f")
    assert result.num_buffers == 1
    assert result.source.split("\n")[3] == "  s[0] = 1.0f;"
    assert "f(msl::Pointer{buffers[0]})" in result.entry


def test_a_kernel_that_is_not_there_is_refused() -> None:
    with pytest.raises(SourceError, match="no kernel g in the source, which has f"):
        translated(KERNEL.format(body=""), "g", "g")


def test_an_attribute_that_the_emulation_lacks_is_refused() -> None:
    source = "[[kernel]] void f(uint v [[amplification_id]]) {}"
    with pytest.raises(SourceError, match="amplification_id"):
        translated(source, "f", "f")

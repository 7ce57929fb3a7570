"""What README and docs show of Python runs as it stands there."""

import contextlib
import io
import pathlib
import re
import warnings

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "docs/python.md", "docs/megatron.md"]
# What the examples print, where the numbers say that they did what the text promises.
PRINTED = {
    "README.md-0": r"0\.0\d+",
    "README.md-2": r"\d+ None",
    "docs/python.md-2": r"2 0\.05",
}


def examples():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text()
        for i, code in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)):
            yield pytest.param(code, f"{document}-{i}", id=f"{document}-{i}")


@pytest.mark.parametrize(("code", "name"), list(examples()))
def test_example(code, name, monkeypatch, tmp_path):
    if "megatron" in code:
        pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    monkeypatch.chdir(tmp_path)
    output = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(output):
        warnings.simplefilter("ignore")
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        finally:
            if "stepgraph.megatron" in code:
                import stepgraph.megatron

                stepgraph.megatron.uninstall()
    assert re.fullmatch(PRINTED.get(name, ".*"), output.getvalue().strip(), re.S), output.getvalue()

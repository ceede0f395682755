"""The Python in the documents runs, and the commands in them, in the readme and in every manual exist."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import formats
import onnx_exports
import onnx_files
import pytest
import torch
import typer
import zoo_coverage
from safetensors.torch import save_file
from typer.testing import CliRunner

from cases import GEOMETRIES
from layers.format_table import FormatRow
from linalg import problems, test_laws
from support_cli import MODEL
from support_nets import batches, small_net
from tensigma.cli.app import app
from tensigma.layers import FORMATS, Compressed, Geometry, recognise, temporary_formats, to_layer, to_modules
from tensigma.solving import METHODS, methods
from tensigma.zoo import load_model

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Pages that are followed from top to bottom: one folder, one session, commands included.
STORIES = (
    "start.md",
    "your-own-model.md",
    "a-detector.md",
    "a-segmenter.md",
    "several-inputs.md",
    "many-processes.md",
    "adding-a-decomposition.md",
)
_BLOCK = re.compile(r'^```(python|sh)(?: title="([^"]*)")?\n(.*?)^```', re.S | re.M)


def blocks_of(page: Path) -> list[tuple[str, str, str]]:
    """Language, file name if any, and text of each block."""
    return _BLOCK.findall(page.read_text(encoding="utf-8"))


def commands_in(text: str) -> Iterator[list[str]]:
    """The arguments of every ``tensigma`` in lines of shell."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["tensigma"]:
            yield words[1:]
        elif words[:1] == ["torchrun"] and "tensigma" in words:
            yield words[words.index("tensigma") + 1 :]


ALONE = [
    pytest.param(text, id=f"{page.name}-{index}")
    for page in PAGES
    if page.name not in STORIES
    for index, (language, _, text) in enumerate(blocks_of(page))
    if language == "python"
]


# Whether it is slower depends on the machine.
@pytest.mark.filterwarnings("ignore:the compressed model is slower:tensigma.errors.PlanWarning")
@pytest.mark.slow
@pytest.mark.parametrize("block", ALONE)
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small network for ``model`` and a few batches for ``loader``."""
    monkeypatch.chdir(tmp_path)
    exec(
        compile(block, "block", "exec", dont_inherit=True),
        {"model": small_net(), "loader": batches(), "build_the_original": small_net},
    )


@contextmanager
def restored_modules_and_methods(folder: Path) -> Iterator[None]:
    """Forget, at the end, every module from ``folder`` and every method and format that was registered."""
    modules, names = set(sys.modules), set(METHODS)
    try:
        with temporary_formats():
            yield
    finally:
        for module in set(sys.modules) - modules:
            if str(folder) in str(getattr(sys.modules[module], "__file__", None)):
                del sys.modules[module]
        for name in set(METHODS) - names:
            del methods._METHODS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", STORIES)
def test_stories_can_be_followed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(METHODS), set(FORMATS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # What the demonstration leaves behind.
    (tmp_path / "demo-output").mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_file(load_model(MODEL).state_dict(), tmp_path / "demo-output" / "digits-cnn-0.safetensors")
    session = {"__name__": "story"}
    with restored_modules_and_methods(tmp_path):
        for language, file, text in blocks_of(ROOT / "docs" / name):
            # The same with a narrower network, which takes a tenth of the time.
            small = text.replace("zoo:digits-cnn", MODEL)
            if file:
                (tmp_path / file).write_text(small, encoding="utf-8")
            if language == "python":
                exec(compile(small, file or name, "exec", dont_inherit=True), session)
            else:
                for arguments in commands_in("" if "torchrun" in text else small):
                    result = CliRunner().invoke(app, arguments)
                    assert result.exit_code == 0, f"{arguments}\n{result.output}"
        if name == "adding-a-decomposition.md":
            assert (set(METHODS) - before[0], set(FORMATS) - before[1]) == ({"separable"}, {"separable"})
    assert (set(METHODS), set(FORMATS)) == before


@pytest.fixture
def separable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The two files of the page on adding a decomposition, as modules."""
    monkeypatch.syspath_prepend(tmp_path)
    files = {file: text for _, file, text in blocks_of(ROOT / "docs" / "adding-a-decomposition.md") if file}
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    with restored_modules_and_methods(tmp_path):
        yield [importlib.import_module(file.removesuffix(".py")) for file in files]


LAWS = [law for name, law in vars(test_laws).items() if name.startswith("test_")]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_added_decomposition_obeys_the_laws(law: Any, separable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the row of the page in the table of solvers."""
    solver, usual = separable[0].Separable, problems.ranks_for
    row = problems.SolverCase(
        lambda ranks: solver(ranks["separable"]), unfold=lambda kernel: kernel[:, 0].reshape(len(kernel), -1)
    )

    def ranks_for(shape: tuple[int, ...], share: float) -> dict[str, Any]:
        return {**usual(shape, share), "separable": max(1, int(share * solver.max_ranks(shape)[0]))}

    monkeypatch.setattr(problems, "ranks_for", ranks_for)
    every = {"dtype": (torch.float32, torch.float64), "seed": (0,), "shape": [shape for shape, _ in problems.KERNELS]}
    names = [name for name in inspect.signature(law).parameters if name != "solver"]
    for values in itertools.product(*(every[name] for name in names)):
        law(row, **dict(zip(names, values, strict=True)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("case", GEOMETRIES)
def test_the_added_format_carries_what_it_says(case: Any, separable: Any) -> None:
    solving, layers = separable
    row = FormatRow(
        "separable",
        layers.SeparableFormat(2),
        lambda draw, t, s, taps: solving.SeparableFactors(draw(s, 2, *taps), draw(t, s, 2)),
        accepts=lambda geometry: geometry.kind == "conv" and geometry.groups == 1,
    )
    layer = case.layer()
    geometry = Geometry.of(layer)
    assert (row.format.why_not(geometry) is None) == row.accepts(geometry)
    if row.accepts(geometry):
        methods.register_format(layers.SeparableFormat)
        (factors,) = row.factors(geometry)
        small = to_modules(factors, geometry, layer.bias)
        dense = to_layer(factors.to_dense()[None], geometry, layer.bias)
        torch.testing.assert_close(small(case.inputs()), dense(case.inputs()), rtol=1e-10, atol=1e-10)
        assert recognise(small) == Compressed(row.format, geometry)
        n_params = sum(weight.numel() for weight in small.parameters())
        assert n_params == factors.n_params + geometry.bias * geometry.out_channels


def _manuals(command: Any, name: str) -> Iterator[tuple[str, str]]:
    yield name, command.help or ""
    for child, own in getattr(command, "commands", {}).items():
        yield from _manuals(own, f"{name} {child}")


def _all_commands() -> Iterator[Any]:
    written = [(page.name, text) for page in PAGES for language, _, text in blocks_of(page) if language == "sh"]
    manuals = [(name, text) for name, text in _manuals(typer.main.get_command(app), "tensigma")]
    for source, text in [*written, *manuals]:
        indented = "\n".join(line.strip() for line in text.splitlines())
        for index, arguments in enumerate(commands_in(_sane(indented))):
            # A variable of the shell stands for several words.
            if not any("$" in argument for argument in arguments):
                yield pytest.param(arguments, id=f"{source}-{index}")


def _sane(text: str) -> str:
    """Lines of a manual that are no shell may hold a single quote."""
    lines = text.replace("\\\n", " ").splitlines()
    return "\n".join(line for line in lines if line.startswith(("tensigma ", "torchrun ")))


COMMANDS = list(_all_commands())


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_exist(arguments: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    context = command.make_context("tensigma", list(arguments))
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)


STEPS = re.findall(
    r"^\| (\d+) \| `([\w/]+\.py)` \| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M
)


@pytest.mark.parametrize(("file", "name"), [pytest.param(*step[1:], id=f"step{step[0]}") for step in STEPS])
def test_steps_through_the_house_are_where_they_are_said_to_be(file: str, name: str) -> None:
    tree = ast.parse((ROOT / "src" / "tensigma" / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_the_house_has_the_rooms_that_are_drawn() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = re.search(r"\| room \| what it has \|\n\|---\|---\|\n(.*?)\n\n", text, re.S)
    assert drawn is not None
    names = [name for row in drawn[1].splitlines() for name in re.findall(r"`([\w/.]+)`", row.split("|")[1])]
    source = ROOT / "src" / "tensigma"
    rooms = {f"{path.parent.name}/" for path in source.glob("*/__init__.py")}
    assert set(names) == rooms | {path.name for path in source.glob("*.py") if not path.name.startswith("__")}
    assert [int(step[0]) for step in STEPS] == list(range(1, len(STEPS) + 1))
    assert 15 < len(STEPS) <= 25


def test_the_page_of_formats_has_the_tables_of_its_results() -> None:
    found = json.loads((ROOT / "results" / "benchmark_formats.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    for table in formats.tables(found["networks"]).split("\n\n"):
        assert table in page, "run: python benchmarks/formats.py --table"


def test_the_page_of_onnx_files_has_the_table_of_its_results() -> None:
    found = json.loads((ROOT / "results" / "benchmark_onnx.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "onnx.md").read_text(encoding="utf-8")
    assert onnx_files.table(found["tasks"]) in page, "run: python benchmarks/onnx_files.py DIR --table"
    found = json.loads((ROOT / "results" / "benchmark_onnx_exports.json").read_text(encoding="utf-8"))
    assert onnx_exports.table(found["networks"]) in page, "run: python benchmarks/onnx_exports.py --table"


def test_the_page_of_coverage_is_that_of_its_results() -> None:
    results = json.loads(zoo_coverage.RESULTS.read_text(encoding="utf-8"))
    page = zoo_coverage.PAGE.read_text(encoding="utf-8")
    assert page == zoo_coverage.page(results), "run: python benchmarks/zoo_coverage.py --page"
    # What is listed as not passing says why.
    assert all(facts.get("error") for facts in results["models"].values() if not zoo_coverage.passed(facts))


def test_there_is_something_to_run() -> None:
    assert len(ALONE) >= 2
    assert len(COMMANDS) >= 30
    assert {page.name for page in PAGES} >= set(STORIES)


def test_a_wrong_command_is_found() -> None:
    with pytest.raises(Exception, match="--buget"):
        test_commands_exist(["compress", "zoo:digits-cnn", "--buget", "params=0.5", "--out", "small/"])

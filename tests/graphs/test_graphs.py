"""Networks from ONNX files as a whole: read, run, copied, compressed, written back; and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import tensigma as ts
from support_graphs import answers_of, assert_same, graph_of, inputs_for, node, weights, written
from tensigma.errors import ExportError, InputError, StoreError


def branching(**options: Any) -> Any:
    """Convolutions with a shortcut, a BatchNorm that is not folded, and a matrix product at the end."""
    nodes = [
        node("Conv", "x w1", "c1", pads=[1, 1, 1, 1]),
        node("BatchNormalization", "c1 scale shift mean var", "n1"),
        node("Relu", "n1", "r1"),
        node("Conv", "r1 w2 b2", "c2", pads=[1, 1, 1, 1]),
        node("Add", "c2 r1", "sum"),
        node("GlobalAveragePool", "sum", "pool"),
        node("Flatten", "pool", "flat"),
        node("MatMul", "flat w3", "product"),
        node("Add", "product b3", "y"),
    ]
    tensors = {
        "w1": weights(12, 4, 3, 3),
        "scale": weights(12, seed=1) + 2,
        "shift": weights(12, seed=2),
        "mean": weights(12, seed=3),
        "var": weights(12, seed=4) ** 2 + 0.5,
        "w2": weights(12, 12, 3, 3),
        "b2": weights(12),
        "w3": weights(12, 10),
        "b3": weights(10),
    }
    return graph_of(nodes, tensors, **options)


def compressed(network: ts.graphs.OnnxNetwork, rank: int = 4, **options: Any) -> ts.graphs.OnnxNetwork:
    plan = ts.plan(network, ranks=ts.Ranks({"*": rank}), norm="frobenius", skip=(), saving="none", **options)
    small, _ = ts.compress(network, plan)
    assert isinstance(small, ts.graphs.OnnxNetwork)
    return small


@pytest.fixture
def batches() -> list[torch.Tensor]:
    return list(torch.randn(24, 4, 9, 7, generator=torch.Generator().manual_seed(0)).split(8))


@pytest.mark.slow
def test_everything_but_replaced_layers_stays_as_it_was(tmp_path: Path, batches: list[torch.Tensor]):
    file = written(branching(domains=["Paddle"]), tmp_path)
    network = ts.load_onnx(file)
    small, report = ts.compress(network, batches, budget=ts.Macs(0.5))
    assert report.after.macs is not None
    assert report.before.macs is not None
    assert report.after.macs <= 0.5 * report.before.macs
    exported = ts.export(small, tmp_path / "small.onnx")
    assert (exported.opset, exported.dynamic_batch, exported.batches) == (17, True, (3, 5))
    before, after = onnx.load(file), onnx.load(tmp_path / "small.onnx")
    for field in ("ir_version", "producer_name", "opset_import", "metadata_props"):
        assert getattr(before, field) == getattr(after, field)
    assert (before.graph.input, before.graph.output) == (after.graph.input, after.graph.output)
    replaced = {layer.name for layer in report.compressed}
    kept = [item for item in before.graph.node if item.name not in replaced]
    assert [item for item in after.graph.node if item in kept] == kept
    stored = {tensor.name: tensor for tensor in after.graph.initializer}
    for tensor in before.graph.initializer:
        assert stored.get(tensor.name, tensor) == tensor
    # The layer that the default leaves dense keeps its weights, and a replaced one does not.
    assert "w1" in stored
    assert "w2" not in stored
    assert_same(small, batches[0], answers_of(tmp_path / "small.onnx", batches[0]))


def test_a_network_that_nothing_was_done_to_is_written_as_it_came(tmp_path: Path):
    file = written(branching(), tmp_path)
    ts.export(ts.load_onnx(file), tmp_path / "again.onnx")
    assert onnx.load(file) == onnx.load(tmp_path / "again.onnx")


def test_weights_that_were_changed_by_hand_are_written(tmp_path: Path):
    network = ts.load_onnx(written(branching(), tmp_path))
    bias = network.get_parameter("the.c2.bias")
    with torch.no_grad():
        bias.add_(1)
    ts.export(network, tmp_path / "other.onnx")
    x = inputs_for(network)
    assert_same(network, x, answers_of(tmp_path / "other.onnx", x))
    stored = {tensor.name for tensor in onnx.load(tmp_path / "other.onnx").graph.initializer}
    assert {"the.c2.weight", "the.c2.bias", "w1"} <= stored


def test_copies_and_pickles_compute_the_same(tmp_path: Path):
    network = ts.load_onnx(written(branching(), tmp_path))
    x = inputs_for(network)
    small = compressed(network)
    for model in (network, small):
        with torch.inference_mode():
            expected = model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_same(other, x, [expected], share=0)
            # Another process opens sessions of its own, and both can still be written.
            assert ts.export(other, tmp_path / "copy.onnx", x).max_difference is not None


def test_values_are_released_after_their_last_use(tmp_path: Path):
    """Passes that halt at a layer keep what later nodes read, and nothing else."""
    nodes = [
        node("Conv", "x w1", "c1", pads=[1, 1, 1, 1]),
        node("Relu", "c1", "r1"),
        node("Conv", "r1 w2", "c2", pads=[1, 1, 1, 1]),
        node("Conv", "c2 w3", "c3", pads=[1, 1, 1, 1]),
        node("Conv", "c3 w4", "y", pads=[1, 1, 1, 1]),
    ]
    shapes = {"w1": (32, 4, 3, 3), "w2": (2, 32, 3, 3), "w3": (2, 2, 3, 3), "w4": (6, 2, 3, 3)}
    graph = graph_of(nodes, {name: weights(*shape) for name, shape in shapes.items()})
    network = ts.load_onnx(written(graph, tmp_path))
    samples = torch.randn(50, 4, 9, 7, generator=torch.Generator().manual_seed(0))
    live = ts.running.live_bytes(network, ts.running.Batch(0, samples[:1], None), list(network.layers))
    n_channels = {"the.c1": 0, "the.c2": 32, "the.c3": 2, "the.y": 2}
    assert live == {name: n * 9 * 7 * 4 for name, n in n_channels.items()}


def test_parameters_outside_layers_count(tmp_path: Path):
    network = ts.load_onnx(written(branching(), tmp_path))
    stored = [numpy_helper.to_array(tensor).size for tensor in network.source.graph.initializer]
    assert ts.evaluation.size_of(network).params == sum(stored)
    # A plan made for a network is refused by one that differs in them.
    model = branching()
    next(t for t in model.graph.initializer if t.name == "mean").CopyFrom(
        numpy_helper.from_array(np.zeros(12, np.float32), "mean")
    )
    other = ts.load_onnx(written(model, tmp_path, "other.onnx"))
    plan = ts.plan(network, ranks=ts.Ranks({"*": 2}), norm="frobenius")
    with pytest.raises(InputError, match="other weights"):
        ts.compress(other, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "batch"), [((1, 4, 9, 7), 1), ((-1, 4, "?", "?"), None), (("n", 4, 9, 7), None)])
def test_sizes_may_be_fixed_or_free_or_badly_named(shape: Any, batch: int | None, tmp_path: Path):
    file = written(branching(input=shape), tmp_path)
    network = ts.load_onnx(file)
    assert network.batch_size == batch
    x = torch.randn(5, 4, 9, 7, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        one_by_one = torch.cat([ts.graphs.OnnxModel(file)(row[None]) for row in x])
    assert_same(network, x, [one_by_one])
    # However the batch is run, every layer is called once.
    assert set(ts.calibrate(network, [x]).values())
    assert ts.calibrate(network, [x])["the.c2"].samples == 5
    small, report = ts.compress(network, [x, x], recipe=ts.Recipe(budget=ts.Macs(0.6), method="svd"))
    assert report.notes["sequential"]
    assert ts.export(small, tmp_path / "small.onnx").dynamic_batch == (batch is None)


def test_layers_of_one_weight_stay_one(tmp_path: Path):
    nodes = [
        node("Conv", "x w b", "c1", pads=[1, 1, 1, 1]),
        node("Conv", "c1 w b", "c2", pads=[1, 1, 1, 1]),
        node("Conv", "c2 v b", "c3", pads=[1, 1, 1, 1]),
        node("Conv", "c3 u b", "y", pads=[1, 1, 1, 1]),
    ]
    tensors = {"w": weights(4, 4, 3, 3), "v": weights(4, 4, 3, 3, seed=1), "u": weights(4, 4, 3, 3, seed=2)}
    file = written(graph_of(nodes, tensors | {"b": weights(4)}), tmp_path)
    network = ts.load_onnx(file)
    reasons = {layer.name: layer.reason for layer in ts.layers.find_layers(network)}
    assert reasons == {
        "the.c1": "weight is tied to the.c2.weight",
        "the.c2": "weight is tied to the.c1.weight",
        "the.c3": None,
        "the.y": None,
    }
    # A shared bias ties nothing: each layer may get another one.
    small = compressed(network, 2)
    x = inputs_for(network)
    ts.export(small, tmp_path / "small.onnx", x)
    assert_same(small, x, answers_of(tmp_path / "small.onnx", x))
    assert {"w", "b"} <= {tensor.name for tensor in onnx.load(tmp_path / "small.onnx").graph.initializer}


def test_weights_that_something_else_reads_stay(tmp_path: Path):
    """A table of embeddings that is the last layer too, and a kernel that two layers read in different forms."""
    table = [
        node("Gather", "table numbers", "rows"),
        node("ReduceMean", "rows", "mean", axes=[0], keepdims=0),
        node("Add", "x mean", "moved"),
        node("MatMul", "moved w", "h"),
        node("Transpose", "table", "turned", perm=[1, 0]),
        node("MatMul", "h turned", "y"),
    ]
    turned = [
        node("MatMul", "x w", "h"),
        node("MatMul", "h v", "i"),
        node("Transpose", "w", "back", perm=[1, 0]),
        node("MatMul", "i back", "y"),
    ]
    square = {"w": weights(24, 24), "v": weights(24, 24, seed=1)}
    tensors = {"table": weights(40, 24), "numbers": np.array([1, 2]), **square}
    both = {"the.h": "its weight is read by MatMul the.y too", "the.y": "its weight is read by MatMul the.h too"}
    cases = {
        "table.onnx": (table, ["the.h"], {"the.y": "its weight is read by Add the.moved too"}),
        "turned.onnx": (turned, ["the.i"], both),
    }
    for name, (nodes, layers, left_alone) in cases.items():
        file = written(graph_of(nodes, tensors, input=("n", 24)), tmp_path, name)
        network = ts.load_onnx(file)
        assert list(network.layers) == layers
        assert network.left_alone.keys() == left_alone.keys()
        assert all(network.left_alone[left].startswith(reason) for left, reason in left_alone.items())
        x = inputs_for(network)
        assert_same(network, x, answers_of(file, x))
        small = compressed(network, 2)
        ts.export(small, tmp_path / "small.onnx", x)
        assert (tmp_path / "small.onnx").stat().st_size < file.stat().st_size


def test_layers_in_functions_are_left_alone(tmp_path: Path):
    inside = [helper.make_node("Conv", ["a", "w"], ["c"]), helper.make_node("Relu", ["c"], ["b"])]
    block = helper.make_function("package", "Block", ["a", "w"], ["b"], inside, [helper.make_opsetid("", 17)])
    calls = [
        helper.make_node("Block", ["x", "w"], ["b"], name="the.block", domain="package"),
        node("Conv", "b v", "y"),
    ]
    model = graph_of(calls, {"w": weights(4, 4, 3, 3), "v": weights(6, 4, 3, 3)}, domains=["package"])
    model.functions.append(block)
    reason = (
        "Block is a function of the file, and layers inside functions are left alone; "
        "onnx.inliner.inline_local_functions puts them into the graph"
    )
    assert_only_y_is_compressed(written(model, tmp_path), {"the.block": reason})


def assert_only_y_is_compressed(file: Path, left_alone: dict[str, str]) -> None:
    """The layer ``the.y`` is compressed and written, and what is ``left_alone`` computes as before."""
    network = ts.load_onnx(file)
    assert list(network.layers) == ["the.y"]
    assert network.left_alone == left_alone
    x = inputs_for(network)
    assert_same(network, x, answers_of(file, x))
    small = compressed(network, 2)
    target = file.with_name("small.onnx")
    ts.export(small, target, x)
    assert_same(small, x, answers_of(target, x))


def test_graphs_inside_nodes_are_left_alone(tmp_path: Path):
    inner = [node("Conv", "x w", "inside", pads=[1, 1, 1, 1])]
    branches = {
        f"{name}_branch": helper.make_graph(inner, name, [], [onnx.ValueInfoProto(name="inside")])
        for name in ("then", "else")
    }
    nodes = [
        node("ReduceMax", "x", "largest", keepdims=0),
        node("Greater", "largest zero", "positive"),
        helper.make_node("If", ["positive"], ["chosen"], name="the.if", **branches),
        node("Conv", "chosen v", "y", pads=[1, 1, 1, 1]),
    ]
    tensors = {"w": weights(4, 4, 3, 3), "v": weights(6, 4, 3, 3), "zero": np.zeros((), np.float32)}
    file = written(graph_of(nodes, tensors), tmp_path)
    reason = "If decides at run time what it computes, so the 2 layers inside it are left alone"
    assert_only_y_is_compressed(file, {"the.if": reason})


def test_a_loop_is_left_alone(tmp_path: Path):
    inside = [
        node("Conv", "state w", "next", pads=[1, 1, 1, 1]),
        node("Identity", "going", "goes_on"),
    ]
    body = helper.make_graph(
        inside,
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, ()),
            helper.make_tensor_value_info("going", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("goes_on", TensorProto.BOOL, ()),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    nodes = [
        helper.make_node("Loop", ["turns", "always", "x"], ["last"], name="the.loop", body=body),
        node("Conv", "last v", "y", pads=[1, 1, 1, 1]),
    ]
    tensors = {
        "w": weights(4, 4, 3, 3),
        "v": weights(6, 4, 3, 3),
        "turns": np.array(2, np.int64),
        "always": np.array(True),
    }
    file = written(graph_of(nodes, tensors), tmp_path)
    reason = "Loop decides at run time what it computes, so the layer inside it is left alone"
    assert_only_y_is_compressed(file, {"the.loop": reason})


def test_operators_of_other_domains_run_as_they_are(tmp_path: Path):
    nodes = [
        helper.make_node("FusedConv", ["x", "w"], ["f"], name="the.f", domain="com.microsoft", activation="Relu"),
        helper.make_node("Gelu", ["f"], ["g"], domain="com.microsoft"),
        node("Conv", "g v", "y"),
    ]
    model = graph_of(nodes, {"w": weights(6, 4, 1, 1), "v": weights(5, 6, 3, 3)}, domains=["com.microsoft"])
    file = written(model, tmp_path)
    network = ts.load_onnx(file)
    assert network.left_alone == {"the.f": "operators of com.microsoft are left as they are"}
    x = inputs_for(network)
    assert_same(network, x, answers_of(file, x))
    ts.export(compressed(network, 2), tmp_path / "small.onnx", x)


def test_old_files_are_read_and_written_in_their_own_way(tmp_path: Path):
    # Before version 4 of the format every stored tensor is an input too; before version 11 Gemm needs a bias.
    nodes = [node("Gemm", "x w b", "h"), node("Relu", "h", "r"), node("Gemm", "r v b", "y")]
    tensors = {"w": weights(8, 8), "v": weights(8, 8, seed=1), "b": weights(8)}
    model = graph_of(nodes, tensors, input=("n", 8), opset=9, ir_version=3)
    for name, array in tensors.items():
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape))
    file = written(model, tmp_path)
    network = ts.load_onnx(file)
    x = inputs_for(network)
    small = compressed(network, 3)
    ts.export(small, tmp_path / "small.onnx", x)
    assert_same(small, x, answers_of(tmp_path / "small.onnx", x))
    assert [value.name for value in onnx.load(tmp_path / "small.onnx").graph.input] == ["x"]


@pytest.mark.slow
def test_half_precision_stays(tmp_path: Path):
    nodes = [node("Conv", "x w b", "c"), node("Relu", "c", "r"), node("Conv", "r v", "y")]
    tensors = {
        "w": weights(8, 4, 3, 3, dtype=np.float16),
        "b": weights(8, dtype=np.float16),
        "v": weights(8, 8, 3, 3, dtype=np.float16),
    }
    file = written(graph_of(nodes, tensors, element=TensorProto.FLOAT16), tmp_path)
    network = ts.load_onnx(file)
    x = inputs_for(network)
    assert_same(network, x, answers_of(file, x), share=2e-3)
    small, _ = ts.compress(network, [x.float(), x.float()], recipe=ts.Recipe(budget=ts.Params(0.6), method="svd"))
    ts.export(small, tmp_path / "small.onnx")
    stored = onnx.load(tmp_path / "small.onnx").graph.initializer
    assert {tensor.data_type for tensor in stored} == {TensorProto.FLOAT16}


def test_weights_in_another_file_stay_outside(tmp_path: Path):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "model.onnx"
    onnx.save_model(branching(), file, save_as_external_data=True, location="weights.bin", size_threshold=100)
    network = ts.load_onnx(file)
    x = inputs_for(network)
    expected = answers_of(file, x)
    assert_same(network, x, expected)
    (tmp_path / "out").mkdir()
    full = compressed(network, 99)
    ts.export(full, tmp_path / "out" / "small.onnx", x)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["small.onnx", "small.onnx.data"]
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1
    assert_same(ts.load_onnx(tmp_path / "out" / "small.onnx"), x, expected)
    whole = (tmp_path / "in" / "weights.bin").read_bytes()
    (tmp_path / "in" / "weights.bin").write_bytes(whole[:1000])
    with pytest.raises(StoreError, match=r"weights\.bin, which is truncated: it has 1,000 bytes, and w1 ends at byte"):
        ts.load_onnx(file)
    (tmp_path / "in" / "weights.bin").unlink()
    with pytest.raises(StoreError, match=r"weights\.bin, which is not beside it"):
        ts.load_onnx(file)


def test_one_file_that_cannot_hold_the_weights_gets_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    network = ts.load_onnx(written(branching(), tmp_path))
    monkeypatch.setattr("tensigma.graphs.saving._LARGEST", 1000)
    x = inputs_for(network)
    ts.export(network, tmp_path / "large.onnx", x)
    assert (tmp_path / "large.onnx.data").stat().st_size > 5000
    assert_same(network, x, answers_of(tmp_path / "large.onnx", x))


def test_other_inputs_may_be_fixed(tmp_path: Path):
    nodes = [
        node("Conv", "x w", "c", pads=[1, 1, 1, 1]),
        node("GlobalAveragePool", "c", "p"),
        node("Flatten", "p", "f"),
        node("Mul", "f factor", "y"),
    ]
    inputs = {"x": ("n", 4, 9, 7), "factor": ("n", 1)}
    file = written(graph_of(nodes, {"w": weights(6, 4, 3, 3)}, inputs=inputs), tmp_path)
    with pytest.raises(
        InputError, match=r"takes 2 inputs .*input='x', fixed=\{'factor'.*'model\.onnx\?input=x&factor="
    ):
        ts.load_onnx(file)
    with pytest.raises(InputError, match="no input 'scale'; it has x, factor"):
        ts.load_onnx(file, fixed={"scale": 1})
    network = ts.load_onnx(file, input="x", fixed={"factor": [[3.0]]})
    x = inputs_for(network)
    expected = answers_of(file, x, fixed={"factor": np.array([[3.0]], np.float32)})
    assert_same(network, x, expected)
    small = compressed(network, 2)
    ts.export(small, tmp_path / "small.onnx", x)
    assert [value.name for value in onnx.load(tmp_path / "small.onnx").graph.input] == ["x", "factor"]
    by_name = ts.zoo.load_model(f"{file}?input=x&factor=[[3.0]]")
    assert_same(by_name, x, expected)


def test_several_outputs_come_by_name(tmp_path: Path):
    nodes = [node("Conv", "x w", "maps"), node("Relu", "maps", "positive"), node("Shape", "maps", "size")]
    model = graph_of(nodes, {"w": weights(6, 4, 3, 3)}, outputs=("positive", "maps", "size", "w"))
    model.graph.output[2].type.tensor_type.elem_type = TensorProto.INT64
    file = written(model, tmp_path)
    network = ts.load_onnx(file)
    x = inputs_for(network)
    with torch.inference_mode():
        assert list(network(x)) == ["positive", "maps", "size", "w"]
    assert_same(network, x, answers_of(file, x))
    # A weight that is also an output is still there when its layer is not.
    ts.export(compressed(network, 2), tmp_path / "small.onnx", x)
    assert_same(ts.load_onnx(tmp_path / "small.onnx"), x, answers_of(tmp_path / "small.onnx", x))


@pytest.mark.slow
def test_a_plan_says_how_layers_were_weighed_without_gradients(tmp_path: Path, batches: list[torch.Tensor]):
    network = ts.load_onnx(written(branching(), tmp_path))
    plan = ts.plan(network, budget=ts.Macs(0.5), data=batches, skip=(), method="svd")
    note = plan.notes["weighing"]
    assert note["by"] == "forward runs"
    assert set(note["effects"]) == {"the.c1", "the.c2", "the.product"}
    assert len({*note["effects"].values()}) == 3
    words = ts.planning.weighing_in_words({**note, "power": 0.5, "tried": []})
    assert "without gradients, layer by layer on" in words


def test_what_needs_gradients_is_refused(tmp_path: Path, batches: list[torch.Tensor]):
    network = ts.load_onnx(written(branching(), tmp_path))
    labelled = [(batch, torch.zeros(len(batch), dtype=torch.long)) for batch in batches]
    for call in (
        lambda: ts.compress(network, batches, budget=ts.Macs(0.5), refine=8),
        lambda: ts.finetune(network, labelled),
        lambda: ts.calibrate(network, batches, fisher="model"),
        lambda: ts.planning.sensitivities(network, batches),
    ):
        with pytest.raises(InputError, match="needs gradients, and a model that came as an ONNX file has none"):
            call()


def test_bad_files_are_refused_with_a_reason(tmp_path: Path):
    file = written(branching(), tmp_path)
    (tmp_path / "cut.onnx").write_bytes(file.read_bytes()[:3000])
    (tmp_path / "empty.onnx").write_bytes(b"")
    for name in ("cut.onnx", "empty.onnx"):
        with pytest.raises(StoreError, match=f"{name} cannot be read as ONNX: .*truncated"):
            ts.load_onnx(tmp_path / name)
    with pytest.raises(StoreError, match="no such file"):
        ts.load_onnx(tmp_path / "absent.onnx")
    unknown = graph_of(
        [node("Conv", "x w", "c"), helper.make_node("Nowhere", ["c"], ["y"], domain="nowhere")],
        {"w": weights(6, 4, 3, 3)},
        domains=["nowhere"],
    )
    with pytest.raises(StoreError, match=r"operator that the installed version .* lacks .*Nowhere"):
        ts.load_onnx(written(unknown, tmp_path, "unknown.onnx"))
    plain = graph_of([node("Relu", "x")], {})
    with pytest.raises(InputError, match="no Conv, ConvTranspose, Gemm or MatMul with constant weights"):
        ts.load_onnx(written(plain, tmp_path, "plain.onnx"))
    with pytest.raises(InputError, match="operators of version 6"):
        ts.load_onnx(written(graph_of([node("Relu", "x")], {}, opset=6, ir_version=3), tmp_path, "old.onnx"))


def test_inputs_of_another_shape_are_refused_in_words(tmp_path: Path):
    network = ts.load_onnx(written(branching(input=(2, 4, 9, 7)), tmp_path))
    with pytest.raises(InputError, match=r"takes 'x' of shape 2 × 4 × 9 × 7, and got 2 × 4 × 8 × 8; .*size=9x7"):
        network(torch.zeros(2, 4, 8, 8))
    with pytest.raises(InputError, match="multiple of 2"):
        network(torch.zeros(3, 4, 9, 7))
    with pytest.raises(InputError, match="channels first"):
        network(torch.zeros(2, 9, 7, 4))
    last = graph_of(
        [node("Transpose", "x", "t", perm=[0, 3, 1, 2]), node("Conv", "t w", "y")],
        {"w": weights(6, 3, 3, 3)},
        input=("n", 8, 8, 3),
    )
    network = ts.load_onnx(written(last, tmp_path, "last.onnx"))
    with pytest.raises(InputError, match=r"channels last, as TensorFlow does; .*layout=nhwc"):
        network(torch.zeros(2, 3, 8, 8))
    assert network(torch.zeros(2, 8, 8, 3)).shape == (2, 6, 6, 6)


def test_a_file_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    network = ts.load_onnx(written(branching(), tmp_path))
    small = compressed(network, 2, layers=["the.c2"])
    target = tmp_path / "small.onnx"
    target.write_bytes(b"former")

    def wrong(network: Any, **options: Any) -> Any:
        proto = ts.graphs.to_proto(network, **options)
        last = next(tensor for tensor in proto.graph.initializer if tensor.name == "b3")
        last.CopyFrom(numpy_helper.from_array(weights(10) + 1, "b3"))
        return proto

    monkeypatch.setattr("tensigma.graphs.saving.to_proto", wrong)
    with pytest.raises(ExportError, match="the file differs from the model"):
        ts.export(small, target, inputs_for(network))
    assert target.read_bytes() == b"former"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "small.onnx"]


def test_modules_that_have_no_nodes_are_refused(tmp_path: Path):
    network = ts.load_onnx(written(branching(), tmp_path))
    network.get_submodule("the").add_module("c2", torch.nn.Identity())
    with pytest.raises(ExportError, match=r"the\.c2 has become a Identity"):
        ts.export(network, tmp_path / "other.onnx", check=False)
    for options, match in (({"format": "torch-export"}, "format='onnx'"), ({"opset": 20}, "keeps its version 17")):
        with pytest.raises(InputError, match=match):
            ts.export(ts.load_onnx(tmp_path / "model.onnx"), tmp_path / "other.onnx", **options)


def test_a_network_that_never_ran_needs_an_example(tmp_path: Path):
    network = ts.load_onnx(written(branching(input=("n", 4, "h", "w")), tmp_path))
    with pytest.raises(InputError, match="pass example="):
        ts.export(network, tmp_path / "other.onnx")
    network(torch.zeros(1, 4, 5, 6))
    assert ts.export(network, tmp_path / "other.onnx").batches == (3, 5)


def test_a_folder_holds_the_graph(tmp_path: Path):
    network = ts.load_onnx(written(branching(), tmp_path))
    small = compressed(network, 2)
    ts.save(small, tmp_path / "small")
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["model.onnx"]
    x = inputs_for(network)
    with torch.inference_mode():
        assert_same(ts.load(tmp_path / "small"), x, [small(x)])
    with pytest.raises(StoreError, match="force"):
        ts.save(small, tmp_path / "small")
    ts.save(small, tmp_path / "small", force=True)
    # A kill between two renames left no folder under its name.
    (tmp_path / "small").rename(tmp_path / ".small.old-999999999")
    with torch.inference_mode():
        assert_same(ts.load(tmp_path / "small"), x, [small(x)])


def test_a_folder_with_a_graph_of_somebody_else_is_never_replaced(tmp_path: Path):
    network = ts.load_onnx(written(branching(), tmp_path))
    (tmp_path / "labels.txt").write_text("cat")
    with pytest.raises(StoreError, match="holds something else"):
        ts.save(network, tmp_path, force=True)
    assert (tmp_path / "labels.txt").read_text() == "cat"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "fp16"])
@pytest.mark.parametrize("opset", [11, 17])
def test_fewer_bits(precision: Any, opset: int, tmp_path: Path, batches: list[torch.Tensor]):
    """Also with operators of a version in which integers have one scale for all channels."""
    network = ts.load_onnx(written(branching(input=(1, 4, 9, 7), opset=opset, ir_version=6 + (opset > 11)), tmp_path))
    small, _ = ts.compress(network, batches, recipe=ts.Recipe(budget=ts.Macs(0.6), method="svd"))
    result = ts.quantize(small, tmp_path / "q.onnx", batches, precision=precision, original=network, latency=False)
    assert result.error < (0.1 if precision == "int8" else 1e-2)
    assert ts.load_onnx(tmp_path / "q.onnx").input == "x"
    operators = {item.op_type for item in onnx.load(tmp_path / "q.onnx").graph.node}
    assert ("QuantizeLinear" in operators) == (precision == "int8")
    with pytest.raises(InputError, match=r"ends with \.onnx"):
        ts.quantize(small, tmp_path / "folder", batches, precision="fp16")

"""The tools and their methods."""

from __future__ import annotations

from dataclasses import dataclass

#: Original parameters ÷ compressed parameters.
RATES = (1.5, 2.0, 3.0, 5.0)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One method of one tool."""

    name: str
    title: str
    #: The file in ``tools/``.
    tool: str
    method: str
    #: The environment, by the name of its requirements; None is the one that runs the benchmark.
    environment: str | None
    rates: tuple[float, ...] = RATES
    #: Whether its result can be trained further.
    trains: bool = True
    #: Whether its merit is fewer bytes rather than fewer parameters.
    quantizes: bool = False


OURS = "tensigma"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(name=OURS, title="Tensigma", tool="tensigma", method="default", environment=None),
        Peer(
            name="torch-pruning-norm",
            title="Torch-Pruning 1.6.1, group norm",
            tool="torch_pruning",
            method="norm",
            environment="torch-pruning",
        ),
        Peer(
            name="torch-pruning-taylor",
            title="Torch-Pruning 1.6.1, Taylor",
            tool="torch_pruning",
            method="taylor",
            environment="torch-pruning",
        ),
        Peer(name="balf", title="BALF's rule, rebuilt", tool="tensigma", method="balf", environment=None),
        Peer(name="alds", title="ALDS's rule, rebuilt", tool="alds", method="alds", environment=None),
        Peer(name="vbmf", title="The paper's rule, Tucker-2 under Σ", tool="tensigma", method="vbmf", environment=None),
        Peer(
            name="tensorly-tucker",
            title="TensorLy 0.10.0, Tucker-2",
            tool="tensorly",
            method="tucker",
            environment="tensorly",
        ),
        Peer(name="tensorly-cp", title="TensorLy 0.10.0, CP", tool="tensorly", method="cp", environment="tensorly"),
        Peer(
            name="fasterai",
            title="fasterai 0.4.1, Tucker-2",
            tool="fasterai",
            method="tucker",
            environment="fasterai",
        ),
        Peer(
            name="fasterai-asvd",
            title="fasterai 0.4.1, SVD and ASVD",
            tool="fasterai",
            method="asvd",
            environment="fasterai",
        ),
        Peer(
            name="aimet-spatial",
            title="AIMET 2.42.0, spatial SVD",
            tool="aimet",
            method="spatial",
            environment="aimet",
        ),
        Peer(name="aimet-weight", title="AIMET 2.42.0, weight SVD", tool="aimet", method="weight", environment="aimet"),
        Peer(
            name="tensigma-int8",
            title="Tensigma, then INT8",
            tool="tensigma",
            method="int8",
            environment=None,
            rates=(1.0, 1.5, 2.0, 3.0),
            trains=False,
            quantizes=True,
        ),
        Peer(
            name="nncf",
            title="NNCF 3.4.0, INT8",
            tool="nncf",
            method="int8",
            environment="nncf",
            rates=(1.0,),
            trains=False,
            quantizes=True,
        ),
        Peer(
            name="onnxruntime",
            title="ONNX Runtime 1.31.1, INT8",
            tool="onnxruntime",
            method="int8",
            environment="onnxruntime",
            rates=(1.0,),
            trains=False,
            quantizes=True,
        ),
    )
}

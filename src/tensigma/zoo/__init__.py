"""Models and data sets by name."""

from tensigma.zoo.batches import Data, FactoryData
from tensigma.zoo.data import load_data
from tensigma.zoo.models import load_model
from tensigma.zoo.overlap import may_share
from tensigma.zoo.spec import Spec, require
from tensigma.zoo.torchvision_operators import import_torchvision
from tensigma.zoo.weights import load_weights_, read_weights

__all__ = [
    "Data",
    "FactoryData",
    "Spec",
    "import_torchvision",
    "load_data",
    "load_model",
    "load_weights_",
    "may_share",
    "read_weights",
    "require",
]

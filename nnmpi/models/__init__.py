"""Ready models: plain `nn`, built from a sample's shape and the number of classes."""

from nnmpi.models.cnn import cnn
from nnmpi.models.mlp import mlp
from nnmpi.models.resnet import resnet

__all__ = ["cnn", "mlp", "resnet"]

"""Ready models, built of plain `nn` from a sample's shape and a number of classes or tokens."""

from nnmpi.models.cnn import cnn
from nnmpi.models.gpt import gpt
from nnmpi.models.llama import llama
from nnmpi.models.lstm import lstm
from nnmpi.models.mlp import mlp
from nnmpi.models.pretrained import from_pretrained, save_adapter
from nnmpi.models.resnet import resnet

__all__ = ["cnn", "from_pretrained", "gpt", "llama", "lstm", "mlp", "resnet", "save_adapter"]

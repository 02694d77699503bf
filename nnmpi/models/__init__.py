"""Ready models, built of plain `nn` from a sample's shape and a number of classes or tokens.

One file per model: mlp, cnn, resnet, lstm, gpt, llama. Files of other programs:

    pretrained       a folder of Hugging Face: `from_pretrained`, and the same written
    llama_files      what config.json says of Llama and its kin, and the names of their weights
    adapter          adapters in PEFT's folders
    torch_weights    any model's weights by PyTorch's names; torch_layers has the arrays of each
                     layer, torch_order the order of elements that a model flattens
"""

from nnmpi.models.cnn import cnn
from nnmpi.models.gpt import gpt
from nnmpi.models.llama import llama
from nnmpi.models.lstm import lstm
from nnmpi.models.mlp import mlp
from nnmpi.models.pretrained import from_pretrained, save_adapter
from nnmpi.models.resnet import resnet

__all__ = ["cnn", "from_pretrained", "gpt", "llama", "lstm", "mlp", "resnet", "save_adapter"]

"""Layers, and the module tree that they form.

Reading order:

    module                  attributes, names, initialization
    linear, ...             the layers
    container               sequences, residual blocks, fusion of layers into one operation
    mode                    training and evaluation
    sharding                tables that assign a sharding to each layer
    chain                   a model as a list of layers to cut into stages
    compiled                recorded steps

To add a layer, write a `Module` in its own file and export it here. A layer that mixes features
also needs a rule in `parallel/sharded`.
"""

from typing import TYPE_CHECKING, Any

from nnmpi.base.words import missing_from
from nnmpi.nn.activation import (
    ELU,
    GELU,
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    Dropout,
    Dropout2d,
    Flatten,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    LeakyReLU,
    LogSoftmax,
    MSELoss,
    NLLLoss,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
    activation,
)
from nnmpi.nn.container import Branches, Pop, Residual, Sequential, Stash
from nnmpi.nn.conv import (
    AdaptiveAvgPool2d,
    AvgPool1d,
    AvgPool2d,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose2d,
    GlobalAvgPool2d,
    MaxPool1d,
    MaxPool2d,
    Upsample,
)
from nnmpi.nn.experts import MixtureOfExperts
from nnmpi.nn.gru import GRU
from nnmpi.nn.linear import Embedding, Linear, TiedLinear
from nnmpi.nn.lstm import LSTM
from nnmpi.nn.mode import continued, current, evaluation, observed, training, unfused
from nnmpi.nn.module import Buffer, Constant, Module, Normal, Parameter, Uniform, fan_in, kaiming
from nnmpi.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from nnmpi.nn.rnn import RNN, GRUCell, LSTMCell, RNNCell
from nnmpi.nn.sharding import Sharding, Units
from nnmpi.nn.transformer import CausalSelfAttention, MultiheadAttention, TransformerBlock

# PyTorch's names: here one class normalizes all shapes, and a module searches its plain lists.
BatchNorm1d = BatchNorm2d = BatchNorm3d = BatchNorm
InstanceNorm1d = InstanceNorm2d = InstanceNorm3d = InstanceNorm
ModuleList = list

__all__ = [
    "ELU",
    "GELU",
    "GRU",
    "LSTM",
    "RNN",
    "AdaptiveAvgPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Branches",
    "Buffer",
    "CausalSelfAttention",
    "Constant",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout2d",
    "Embedding",
    "Flatten",
    "GRUCell",
    "GlobalAvgPool2d",
    "GroupNorm",
    "HuberLoss",
    "InstanceNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KLDivLoss",
    "L1Loss",
    "LSTMCell",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MixtureOfExperts",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "NLLLoss",
    "Normal",
    "Parameter",
    "Pop",
    "RMSNorm",
    "RNNCell",
    "ReLU",
    "Residual",
    "Sequential",
    "Sharding",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Stash",
    "Tanh",
    "TiedLinear",
    "TransformerBlock",
    "Uniform",
    "Units",
    "Upsample",
    "activation",
    "continued",
    "current",
    "evaluation",
    "fan_in",
    "kaiming",
    "observed",
    "training",
    "unfused",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        missing_from(__name__, name)

"""A recurrent language model: an LSTM that predicts the next token."""

from nnmpi.base.errors import check_int
from nnmpi.nn.activation import Dropout
from nnmpi.nn.container import Sequential
from nnmpi.nn.linear import Embedding, Linear, TiedLinear
from nnmpi.nn.module import Module, Uniform
from nnmpi.nn.recurrent import LSTM
from nnmpi.nn.sharding import Sharding

BOUND = 0.1  # of the uniform initial values of embedding and output


def lstm(
    vocabulary: int, features: int = 512, layers: int = 2, dropout: float = 0.0, tied: bool = True
) -> Sequential:
    """Return an LSTM language model: tokens (batch, time) -> logits of the next token.

        tokens -> embedding -> [dropout -> LSTM] x layers -> dropout -> output -> logits

    Zaremba et al., "Recurrent neural network regularization", 2014. Each recurrent layer is a
    module of the sequence, so a pipeline may cut between any two. Padding after a sequence does not
    change its logits. The padding is computed, too: in batches of similar lengths (see
    `data.sampler.by_length`) it is 1 to 3 of 100 positions, and packing the sequences instead, as
    `nn.LSTM` can, takes as long.

    The sharding table has the vocabulary; each rank computes the recurrent layers in full.

    Args:
        vocabulary: the number of tokens.
        features: of the embedding and of each layer.
        layers: the number of LSTM layers.
        dropout: the probability of dropping an element in training.
        tied: whether the output is the embedding's table, transposed, instead of a linear layer.

    Raises:
        UsageError: for sizes below 1.

    Example:
        >>> model = models.lstm(65, features=32, layers=2).initialize(seed=0)
        >>> model(np.zeros((2, 16), int)).shape  # logits of the next token
        (2, 16, 65)
    """
    vocabulary = check_int("lstm's vocabulary", vocabulary)
    features = check_int("lstm's features", features)
    layers = check_int("lstm's layers", layers)
    embedding = Embedding(vocabulary, features, Uniform(BOUND))
    body: list[Module] = [embedding]
    for _ in range(layers):
        body += [Dropout(dropout), LSTM(features, features)]
    output = TiedLinear(embedding) if tied else Linear(features, vocabulary, init=Uniform(BOUND))
    model = Sequential(*body, Dropout(dropout), output)
    model.sharding = {"0": Sharding.VOCAB, str(len(model) - 1): Sharding.VOCAB}
    return model

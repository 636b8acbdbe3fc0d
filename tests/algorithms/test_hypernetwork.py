"""The hypernetwork: weights for any module, equal to a stack of `nn.Linear`, of the sizes the paper gives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_close
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from pfedhn import keys
from pfedhn.algorithms.embeddings import Embeddings
from pfedhn.algorithms.hypernetwork import Hypernetwork
from pfedhn.algorithms.pfedhn import PFedHN
from pfedhn.models import LeNet
from pfedhn.params import Params

SHAPE = st.lists(st.integers(1, 4), max_size=4).map(torch.Size)  # scalars and vectors among them
SHAPES = st.dictionaries(st.text("abc.", min_size=1, max_size=6), SHAPE, min_size=1, max_size=5)


def double(params: Params) -> Params:
    return {name: value.double() for name, value in params.items()}


def num_weights(shapes: dict[str, torch.Size]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


@given(SHAPES, st.integers(0, 2), st.booleans(), st.booleans(), st.integers(1, 4))
@settings(max_examples=40)
def test_any_shapes(shapes: dict[str, torch.Size], num_hidden: int, linear: bool, spectral: bool, dim: int) -> None:
    form = Hypernetwork(dim, 5, num_hidden, linear, spectral)
    phi = form.init({"net": shapes}, 1)
    vectors = form.init_spectral(phi, {"net": shapes}, 2)
    for leading in ((), (3,)):
        made = form.generate(phi, vectors, "net", shapes, torch.ones(*leading, dim))
        assert list(made) == list(shapes)
        assert {name: value.shape for name, value in made.items()} == {
            name: torch.Size([*leading, *shape]) for name, shape in shapes.items()
        }
        assert all(bool(torch.isfinite(value).all()) for value in made.values())


class Odd(nn.Module):
    """A scalar, a vector, a matrix and a five-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.ones(3))
        self.mix = nn.Linear(3, 2, bias=False)
        self.cube = nn.Parameter(torch.ones(1, 2, 1, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.scale * x + self.shift) + self.cube.sum()


def test_generated_weights_run_in_the_module() -> None:
    module = Odd()
    shapes = {name: value.shape for name, value in module.named_parameters()}
    form = Hypernetwork(2, 4, 1)
    weights = form.generate(form.init({"odd": shapes}, 1), {}, "odd", shapes, torch.ones(2))
    assert functional_call(module, weights, (torch.ones(5, 3),)).shape == (5, 2)


@pytest.mark.parametrize("num_hidden", [0, 1, 3])
def test_is_a_stack_of_linear_layers(num_hidden: int) -> None:
    """ReLU between the layers of the trunk, none between the trunk and the heads, one head per tensor."""
    shapes = {"scale": torch.Size([]), "a": torch.Size([2, 3]), "b": torch.Size([4])}
    form = Hypernetwork(3, 6, num_hidden)
    phi = double(form.init({"net": shapes}, 1))
    layers: list[nn.Module] = []
    for i in range(1 + num_hidden):
        layer = nn.Linear(3 if i == 0 else 6, 6, dtype=torch.float64)
        layer.load_state_dict({part: phi[f"trunk.{i}.{part}"] for part in ("weight", "bias")})
        layers += [layer] if i == 0 else [nn.ReLU(), layer]
    trunk = nn.Sequential(*layers)
    v = keys.normal(2, 12).reshape(4, 3)
    made = form.generate(phi, {}, "net", shapes, v)
    first = 0
    for name, shape in shapes.items():
        rows = slice(first, first + math.prod(shape))
        head = nn.Linear(6, math.prod(shape), dtype=torch.float64)
        head.load_state_dict({part: phi[f"head.net.{part}"][rows] for part in ("weight", "bias")})
        assert_close(made[name], head(trunk(v)).reshape(4, *shape).detach())
        first = rows.stop
    assert first == len(phi["head.net.bias"])


def test_linear_is_a_matrix() -> None:
    shapes = {"a": torch.Size([2, 3]), "b": torch.Size([4])}
    form = Hypernetwork(3, linear=True)
    phi = double(form.init({"net": shapes}, 1))
    assert {name: value.shape for name, value in phi.items()} == {"head.net.weight": (10, 3)}
    v = keys.normal(2, 3)
    made = form.generate(phi, {}, "net", shapes, v)
    assert_close(torch.cat([value.flatten() for value in made.values()]), phi["head.net.weight"] @ v)


def test_layers_are_drawn_as_nn_linear_draws_them() -> None:
    """Uniform within 1 / sqrt(fan-in), weight and bias; each layer from a key of its own."""
    shapes = {"a": torch.Size([50, 20])}
    phi = Hypernetwork(16, 100, 2).init({"net": shapes}, 1)
    for name, value in phi.items():
        fan_in = phi[name.rpartition(".")[0] + ".weight"].shape[1]
        bound = 1 / math.sqrt(fan_in)
        assert 0.9 * bound < value.abs().max() <= bound
        assert abs(value.std() - bound / math.sqrt(3)) < 0.1 * bound
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            usual = nn.Linear(fan_in, 1000)
        assert usual.weight.abs().max() <= bound  # what torch itself does
    weights = [value.flatten()[:50] for name, value in phi.items() if name.endswith("weight")]
    assert len({tuple(value.tolist()) for value in weights}) == len(weights)


def test_an_architecture_more_leaves_the_others_as_they_are() -> None:
    small, large = {"a": torch.Size([2])}, {"a": torch.Size([5]), "b": torch.Size([])}
    form = Hypernetwork(3, 4, 1)
    alone, both = form.init({"small": small}, 1), form.init({"small": small, "large": large}, 1)
    assert set(alone) < set(both)
    assert all(torch.equal(alone[name], both[name]) for name in alone)
    assert both["head.large.weight"].shape == (6, 4)


@pytest.mark.parametrize(("num_clients", "dim"), [(10, 3), (50, 13), (75, 19), (90, 23), (100, 26)])
def test_embedding_dimension_is_the_papers(num_clients: int, dim: int) -> None:
    assert PFedHN().for_clients(num_clients).embeddings.dim == dim
    assert PFedHN(embeddings=Embeddings(dim=7)).for_clients(num_clients).embeddings.dim == 7


def test_embedding_dimension_stays_sane() -> None:
    dims = [Embeddings().for_clients(num_clients, None).dim for num_clients in (1, 2, 1_000, 1_000_000)]
    assert dims == sorted(dims)
    assert dims[0] >= 1
    assert dims[-1] <= 64


@pytest.mark.parametrize(("num_kernels", "size"), [(8, 62_958), (16, 121_182), (32, 256_830)])
def test_lenet_has_the_papers_sizes(num_kernels: int, size: int) -> None:
    shapes = {name: value.shape for name, value in LeNet(10, num_kernels).named_parameters()}
    assert num_weights(shapes) == size
    hypernetwork = Hypernetwork(13)
    with torch.device("meta"):
        trunk = [nn.Linear(13, 100), *(nn.Linear(100, 100) for _ in range(3)), nn.Linear(100, size)]
    expected = sum(value.numel() for layer in trunk for value in layer.parameters())
    assert sum(value.numel() for value in hypernetwork.init({"lenet": shapes}, 0).values()) == expected


def test_lenet_for_a_hundred_classes() -> None:
    assert sum(value.numel() for value in LeNet(100).parameters()) == 128_832


# Spectral normalization

SPECTRAL = Hypernetwork(3, 6, 1, spectral_norm=True)
TARGET = {"w": torch.Size([2, 4]), "b": torch.Size([3]), "s": torch.Size([])}


def matrices(phi: Params) -> Params:
    first, found = 0, {name: phi[f"{name}.weight"] for name in ("trunk.0", "trunk.1")}
    for name, shape in TARGET.items():
        found[f"head.net.{name}"] = phi["head.net.weight"][first : first + math.prod(shape)]
        first += math.prod(shape)
    return found


def test_spectral_vectors_are_singular_vectors() -> None:
    phi = double(SPECTRAL.init({"net": TARGET}, 1))
    vectors = SPECTRAL.init_spectral(phi, {"net": TARGET}, 2)
    for _ in range(500):
        vectors = SPECTRAL.power_step(phi, vectors, {"net": TARGET})
    assert set(vectors) == set(matrices(phi))
    for name, matrix in matrices(phi).items():
        u, s, _ = torch.linalg.svd(matrix)
        assert_close(vectors[name].norm(), torch.ones((), dtype=torch.float64))
        assert_close(torch.dot(vectors[name], u[:, 0]).abs(), torch.ones((), dtype=torch.float64))
        assert_close((matrix.T @ vectors[name]).norm(), s[0])


def test_one_power_step_is_what_torch_does() -> None:
    phi = double(SPECTRAL.init({"net": TARGET}, 1))
    vectors = SPECTRAL.init_spectral(phi, {"net": TARGET}, 2)
    after = SPECTRAL.power_step(phi, vectors, {"net": TARGET})
    for name, matrix in matrices(phi).items():
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, dtype=torch.float64)
        layer.load_state_dict({"weight": matrix})
        nn.utils.parametrizations.spectral_norm(layer)
        (norm,) = layer.parametrizations.weight
        norm._u.copy_(vectors[name])
        norm._v.copy_(normalize(matrix.T @ vectors[name], dim=0))
        normalized = layer.train().weight  # torch takes its power step in the forward pass
        assert_close(after[name], norm._u)
        u, v = after[name], normalize(matrix.T @ after[name], dim=0)
        assert_close(matrix / torch.dot(u, matrix @ v), normalized.detach())


def test_normalized_layers_have_norm_one() -> None:
    """After enough power steps every layer is 1-Lipschitz but for its bias, whatever the scale of its weights."""
    phi = {name: 7 * value for name, value in double(SPECTRAL.init({"net": TARGET}, 1)).items()}
    vectors = SPECTRAL.init_spectral(phi, {"net": TARGET}, 2)
    for _ in range(500):
        vectors = SPECTRAL.power_step(phi, vectors, {"net": TARGET})
    flat = {name: value * (0 if name.endswith("bias") else 1) for name, value in phi.items()}
    plain = Hypernetwork(3, 6, 1)
    made = SPECTRAL.generate(flat, vectors, "net", TARGET, v := keys.normal(3, 3))
    parts = {name: matrix / torch.linalg.matrix_norm(matrix, 2) for name, matrix in matrices(flat).items()}
    head = torch.cat([parts[f"head.net.{name}"] for name in TARGET])
    scaled = flat | {f"trunk.{i}.weight": parts[f"trunk.{i}"] for i in range(2)} | {"head.net.weight": head}
    assert_close(made, plain.generate(scaled, {}, "net", TARGET, v))


def test_without_spectral_norm_there_are_no_vectors() -> None:
    form = Hypernetwork(3)
    assert form.init_spectral({}, {"net": TARGET}, 1) == {}
    assert form.power_step({}, {}, {"net": TARGET}) == {}


BIG = {"a": torch.Size([6, 5]), "scale": torch.Size([]), "b": torch.Size([4, 3, 2]), "c": torch.Size([7])}


def test_an_added_head_is_a_dense_one_that_starts_from_zero() -> None:
    form = Hypernetwork(3, 4, 1, head="added")
    phi, v = double(form.init({"net": BIG}, 1)), keys.normal(2, 6).reshape(2, 3)
    assert all(bool((value == 0).all()) for value in form.generate(phi, {}, "net", BIG, v).values())
    dense = Hypernetwork(3, 4, 1)
    drawn = double(dense.init({"net": BIG}, 1))
    assert {name for name in drawn if not torch.equal(drawn[name], phi[name])} == {"head.net.weight", "head.net.bias"}
    assert_close(form.generate(drawn, {}, "net", BIG, v), dense.generate(drawn, {}, "net", BIG, v))


def test_a_low_rank_head_writes_factors_of_matrices() -> None:
    form = Hypernetwork(3, 4, 1, head="low-rank", rank=2)
    phi = double(form.init({"net": BIG}, 1))
    assert len(phi["head.net.weight"]) == 2 * (6 + 5) + 1 + 2 * (4 + 6) + 7  # two matrices in two factors each
    v = keys.normal(2, 6).reshape(2, 3)
    assert all(bool((value == 0).all()) for value in form.generate(phi, {}, "net", BIG, v).values())
    phi["head.net.bias"] = keys.normal(3, len(phi["head.net.bias"]))
    made = form.generate(phi, {}, "net", BIG, v)
    assert {name: value.shape[1:] for name, value in made.items()} == BIG
    dense = form.generate(phi, {}, "net", {"flat": torch.Size([len(phi["head.net.bias"])])}, v)["flat"]
    left, right, scale = dense[:, :12].reshape(2, 6, 2), dense[:, 12:22].reshape(2, 5, 2), dense[:, 22]
    assert_close(made["a"], torch.einsum("cir,cjr->cij", left, right))
    assert_close(made["scale"], scale)
    assert all(int(torch.linalg.matrix_rank(made[name][0].flatten(1))) == 2 for name in ("a", "b"))
    assert_close(made["c"], dense[:, -7:])


@pytest.mark.parametrize("chunk_size", [9, 31, 62, 100])
def test_a_chunked_head_writes_a_piece_at_a_time(chunk_size: int) -> None:
    """Whether or not the length of a piece divides that of the target."""
    form = Hypernetwork(3, 4, 1, head="chunked", chunk_size=chunk_size)
    phi = double(form.init({"net": BIG}, 1))
    v = keys.normal(2, 6).reshape(2, 3)
    assert all(bool((value == 0).all()) for value in form.generate(phi, {}, "net", BIG, v).values())
    phi["head.net.weight"] = keys.normal(3, chunk_size * 4).reshape(chunk_size, 4)
    made = form.generate(phi, {}, "net", BIG, v)
    pieces = []
    for chunk in phi["head.net.chunks"]:
        features = torch.cat([v, chunk.expand(2, -1)], 1) @ phi["trunk.0.weight"].T + phi["trunk.0.bias"]
        features = features.relu() @ phi["trunk.1.weight"].T + phi["trunk.1.bias"]
        pieces.append(features @ phi["head.net.weight"].T + phi["head.net.bias"])
    flat = torch.cat(pieces, 1)[:, :62]
    assert_close(torch.cat([value.reshape(2, -1) for value in made.values()], 1), flat)

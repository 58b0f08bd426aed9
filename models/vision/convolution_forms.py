"""A convolution, in the form that is quickest on the devices of the mesh around.

On GPUs that is one call of XLA's convolution (`dilated_gradient`: of a dilated one the kernel's
gradient is another). On CPUs XLA's is quick in itself and slow in some
shapes, for which `quickest` names another form:

- `joined`: XLA computes the gradient of a grouped kernel in a plain loop. Here groups are joined
  until they have `WIDTH` channels, each a dense convolution whose kernel is zero between groups:
  more products, and all of them quick.
- `each`: where each channel is a group, and the kernel is small, a sum of entries times numbers.
- `shifted`: of a kernel dilated by as much as the image is wide most products only see padding, and
  XLA computes them. Here each place of the kernel is one matrix product, of what it sees. With one
  place that is a product, whose gradients XLA's convolution takes twice the time for.
- `patches`: with fewer pixels than channels it is quicker to lay out what each pixel sees, and to
  take a product of it.

All are sums of products of JAX, so derivatives of any order, `vmap` and sharding work. What is zero
between joined groups is multiplied too: an infinite number in one is a NaN in the others.

[N]umber of images, [H]eight, [W]idth, [C]hannels, [I]n and [O]ut.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.models.vision.dilated_gradient import dilated
from hfjax.pallas_kernels import current_platform

ORDER = ("NHWC", "HWIO", "NHWC")
WIDTH = 32  # channels that joined groups have: fewer fill no register, more are mostly zeros
SEEN = 0.75  # of all products: where fewer see the image, the others are left out
PLACES = 9  # that `each` takes at most
TURNED = 512  # pixels from which on it pays to turn a matrix around
Both = int | Sequence[int]


def convolve(
    x_NHWC: jax.Array,
    kernel_HWIO: jax.Array,
    stride: Both = 1,
    padding: int | Sequence[tuple[int, int]] = 0,
    dilation: Both = 1,
    groups: int = 1,
) -> jax.Array:
    """Return `jax.lax.conv_general_dilated`, computed in the form that is quickest here.

    Args:
        x_NHWC: Images.
        kernel_HWIO: The kernel, of the same dtype; I counts the channels of one group.
        stride: Of both dimensions, or of each.
        padding: How many zeros on all sides, or ((above, below), (left, right)).
        dilation: How far the kernel's places are from one another.
        groups: Into how many groups channels fall, those in and those out.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.vision.convolution_forms import convolve
        >>> convolve(jnp.ones((1, 3, 3, 2)), jnp.ones((3, 3, 2, 1)), padding=1)[0, :, :, 0].tolist()
        [[8.0, 12.0, 8.0], [12.0, 18.0, 12.0], [8.0, 12.0, 8.0]]
    """
    both = lambda n: tuple(n) if isinstance(n, Sequence) else (n, n)
    pads = padding if isinstance(padding, Sequence) else [(padding, padding)] * 2
    window = Window(both(stride), tuple((a, b) for a, b in pads), both(dilation), groups)
    out = jax.eval_shape(lambda x, k: as_one(x, k, window), x_NHWC, kernel_HWIO)  # XLA's own errors
    if not jnp.issubdtype(out.dtype, jnp.floating):
        return as_one(x_NHWC, kernel_HWIO, window)
    if current_platform.platform() != "cpu":
        return on_a_gpu(x_NHWC, kernel_HWIO, window)
    return FORMS[quickest(x_NHWC.shape, kernel_HWIO.shape, window)](x_NHWC, kernel_HWIO, window)


@dataclass(frozen=True)
class Window:
    """How a kernel moves over images, as in `convolve`."""

    stride: tuple[int, ...] = (1, 1)
    padding: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    def places(self, x: Sequence[int], kernel: Sequence[int]) -> list[tuple["Overlap", "Overlap"]]:
        """Return what each place of a kernel sees of images, row by row; shapes are given."""
        rows, columns = ([self._seen(d, x, kernel, t) for t in range(kernel[d])] for d in (0, 1))
        return [(row, column) for row in rows for column in columns]

    def size(self, dim: int, x: Sequence[int], kernel: Sequence[int]) -> int:
        """Return the height (0) or width (1) of what comes out."""
        reach = self.dilation[dim] * (kernel[dim] - 1) + 1
        return max(0, (x[dim + 1] + sum(self.padding[dim]) - reach) // self.stride[dim] + 1)

    def _seen(self, dim: int, x: Sequence[int], kernel: Sequence[int], place: int) -> "Overlap":
        step, before = self.stride[dim], place * self.dilation[dim] - self.padding[dim][0]
        size = self.size(dim, x, kernel)
        start = min(size, max(0, -(before // step)))
        stop = max(start, min(size, (x[dim + 1] - 1 - before) // step + 1))
        return Overlap(start, stop, size, start * step + before, step)


@dataclass(frozen=True)
class Overlap:
    """What one place of a kernel sees of images, along one dimension.

    Attributes:
        start: Of what comes out the first entry for which it sees no padding.
        stop: What comes after the last one.
        size: How many entries come out.
        first: What it sees of the images for the first of them.
        step: How far it then moves.
    """

    start: int
    stop: int
    size: int
    first: int
    step: int

    @property
    def count(self) -> int:
        """For how many entries it sees no padding."""
        return self.stop - self.start

    @property
    def limit(self) -> int:
        """What comes after the last that it sees."""
        return self.first + (self.count - 1) * self.step + 1

    @property
    def around(self) -> tuple[int, int, int]:
        """The zeros before, after and between what it adds to."""
        return self.start, self.size - self.stop, 0


def quickest(x: Sequence[int], kernel: Sequence[int], window: Window) -> str:
    """Return the name of the form that is quickest on CPUs for images and kernel of these shapes.

    The first that fits:

    - nothing comes out: XLA's;
    - each channel by itself, and at most `PLACES` in the kernel: `each`;
    - several groups: `joined`;
    - a kernel of one place, or one that mostly sees padding: `shifted`;
    - no more pixels come out than channels: `patches`;
    - else XLA's.

    Images are those that a program is traced with: in a step, those of all devices.
    """
    places = window.places(x, kernel)
    pixels = [row.size * column.size for row, column in places]
    seen = [row.count * column.count for row, column in places]
    if not sum(pixels) * x[0]:
        return "as_one"
    if window.groups > 1:
        alone = kernel[2] == 1 and kernel[3] == window.groups and len(places) <= PLACES
        return "each" if alone else "joined"
    if len(places) == 1 or (min(kernel[2:]) >= 128 and sum(seen) < SEEN * sum(pixels)):
        return "shifted"
    return "patches" if x[0] * pixels[0] <= kernel[3] else "as_one"


def on_a_gpu(x: jax.Array, kernel: jax.Array, window: Window) -> jax.Array:
    """Return XLA's convolution; where it is dilated, with another form of the kernel's gradient."""
    rate, sides = window.dilation[0], kernel.shape[:2]
    around = tuple((n // 2, n // 2) for n in sides)
    keeps = tuple((rate * a, rate * b) for a, b in around) == window.padding
    odd = all(n % 2 for n in sides) and window.dilation == (rate, rate)
    if rate == 1 or window.stride != (1, 1) or window.groups > 1 or not (keeps and odd):
        return as_one(x, kernel, window)
    plain = replace(window, dilation=(1, 1), padding=around)
    whole, of_plain = (partial(as_one, window=w) for w in (window, plain))
    return dilated(whole, of_plain, rate, x, kernel)


def as_one(x: jax.Array, kernel: jax.Array, window: Window) -> jax.Array:
    """Return XLA's convolution."""
    return lax.conv_general_dilated(
        x,
        kernel,
        window.stride,
        window.padding,
        rhs_dilation=window.dilation,
        dimension_numbers=ORDER,
        feature_group_count=window.groups,
    )


def joined(x: jax.Array, kernel: jax.Array, window: Window) -> jax.Array:
    """Return dense convolutions of a few groups each, side by side."""
    wide = kernel.shape[2]
    pieces = -(-window.groups // max(1, WIDTH // wide))
    few = -(-window.groups // pieces)  # groups in each piece, but for the last
    counts = [min(few, window.groups - at) for at in range(0, window.groups, few)]
    out = kernel.shape[3] // window.groups
    xs = lax.split(x, [n * wide for n in counts], axis=3)
    kernels = lax.split(kernel, [n * out for n in counts], axis=3)
    dense = replace(window, groups=1)
    found = []
    for n, piece, narrow in zip(counts, xs, kernels, strict=True):
        whole = between(narrow, n)
        form = FORMS[quickest(piece.shape, whole.shape, dense)]
        found.append(form(piece, whole, dense))
    return jnp.concatenate(found, axis=3) if len(found) > 1 else found[0]


def each(x: jax.Array, kernel: jax.Array, window: Window) -> jax.Array:
    """Return each channel's own convolution: entries times the numbers of the kernel, summed."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    padded, inner = enlarged(x, window)
    numbers = kernel.reshape(-1, 1, 1, 1, kernel.shape[3]).astype(wide)
    places = zip(inner.places(padded.shape, kernel.shape), numbers, strict=True)
    total = sum(what(padded, *place) * number for place, number in places)
    return jnp.asarray(total, x.dtype)


def between(kernel: jax.Array, groups: int) -> jax.Array:
    """Return the dense kernel of so many groups: zero from one to another."""
    if groups == 1:
        return kernel
    height, width, inside, outside = kernel.shape
    same = jnp.eye(groups, dtype=kernel.dtype)[None, None, :, None, :, None]
    each = kernel.reshape(height, width, 1, inside, groups, outside // groups)
    return (each * same).reshape(height, width, groups * inside, outside)


def shifted(x: jax.Array, kernel: jax.Array, window: Window) -> jax.Array:
    """Return the sum, over the places of a dense kernel, of what each sees times its matrix."""
    total: jax.Array | None = None
    matrices = kernel.reshape(-1, *kernel.shape[2:])
    for place, matrix in zip(window.places(x.shape, kernel.shape), matrices, strict=True):
        row, column = place
        if row.count and column.count:
            part = product(what(x, *place), matrix)
            around = ((0, 0, 0), row.around, column.around, (0, 0, 0))
            part = lax.pad(part, jnp.zeros((), part.dtype), around)
            total = part if total is None else total + part
    return as_one(x, kernel, window) if total is None else total.astype(x.dtype)


def patches(x: jax.Array, kernel: jax.Array, window: Window) -> jax.Array:
    """Return one product, of all that each pixel sees and of the whole dense kernel.

    The backward pass lays it out again: it is many times as large as the images.
    """

    @jax.checkpoint
    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        padded, inner = enlarged(x, window)
        seen = [what(padded, *place) for place in inner.places(padded.shape, kernel.shape)]
        matrix = kernel.reshape(-1, kernel.shape[3])
        return product(jnp.concatenate(seen, axis=3), matrix).astype(x.dtype)

    return run(x, kernel)


def enlarged(x: jax.Array, window: Window) -> tuple[jax.Array, Window]:
    """Return images with their padding, and how a kernel moves over them."""
    around = ((0, 0, 0), *((a, b, 0) for a, b in window.padding), (0, 0, 0))
    inner = replace(window, padding=((0, 0), (0, 0)))
    return lax.pad(x, jnp.zeros((), x.dtype), around), inner


def what(x: jax.Array, row: Overlap, column: Overlap) -> jax.Array:
    """Return what a place of a kernel sees of images."""
    start, stop = (0, row.first, column.first, 0), (x.shape[0], row.limit, column.limit, x.shape[3])
    return lax.slice(x, start, stop, (1, row.step, column.step, 1))


def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Return what a matrix makes of each pixel, summed in float32 or wider.

    XLA's CPU takes half as long for the gradient of a matrix with fewer rows than columns.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    inside, outside = matrix.shape
    rows = x.reshape(-1, inside)  # of four dimensions XLA would transpose what comes back
    if inside >= 2 * outside and rows.shape[0] >= TURNED:
        turned = lax.optimization_barrier(matrix.T)  # else XLA turns it back
        found = jnp.einsum("ri,oi->ro", rows, turned, preferred_element_type=wide)
    else:
        found = jnp.einsum("ri,io->ro", rows, matrix, preferred_element_type=wide)
    return found.reshape(*x.shape[:3], outside)


FORMS: dict[str, Callable[[jax.Array, jax.Array, Window], jax.Array]] = {
    "as_one": as_one,
    "each": each,
    "joined": joined,
    "shifted": shifted,
    "patches": patches,
}

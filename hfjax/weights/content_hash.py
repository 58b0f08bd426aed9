"""A hash of the weights in a model's files: of the tensors' bytes, however they lie in files.

Each process reads some of the chunks; the hash is a sum over chunks, so any process may read any.
"""

import hashlib
import zlib
from collections.abc import Iterator, Sequence

import jax

from hfjax.distributed.exchange import gather_values
from hfjax.weights.tensor_files import FileTensor

CHUNK = 16 << 20  # bytes
MODULUS = 1 << 128


def local_hash(tensors: Sequence[FileTensor]) -> int:
    """Return the part of the hash that is of the chunks which this process reads."""
    chunks = list(_chunks(tensors))[jax.process_index() :: jax.process_count()]
    return sum(_hash_chunk(*chunk) for chunk in chunks) % MODULUS


def combine_hashes(local: int) -> str:
    """Return the hash of all chunks, given the part of each process; all processes call this."""
    count = jax.process_count()
    parts = gather_values(range(count), str(local)).values() if count > 1 else [local]
    return f"{sum(map(int, parts)) % MODULUS:032x}"


def _chunks(tensors: Sequence[FileTensor]) -> Iterator[tuple[FileTensor, int]]:
    """Yield each chunk, as a tensor and an offset in it, by the names of the tensors."""
    for tensor in sorted(tensors, key=lambda t: t.name):
        yield from ((tensor, start) for start in range(0, max(tensor.nbytes, 1), CHUNK))


def _hash_chunk(tensor: FileTensor, start: int) -> int:
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.begin + start)
        checksum = zlib.crc32(file.read(min(CHUNK, tensor.nbytes - start)))
    text = f"{tensor.name} {tensor.dtype} {tensor.shape} {start} {checksum}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")

"""One image file, decoded: only plain formats, never more than a set number of pixels, never half a picture."""

import io
import warnings
from typing import IO, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ness._files import reason
from ness.errors import NessError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM", "TIFF")
_PIXELS = 50_000_000
LARGEST = 1 << 28  # bytes of an image file
Filter = Literal["lanczos", "bilinear"]
_FILTERS = {"lanczos": Image.Resampling.LANCZOS, "bilinear": Image.Resampling.BILINEAR}


def bytes_of(file: IO[bytes], size: int, name: str) -> bytes:
    """All of an image file of so many bytes, if it is no larger than an image can be."""
    if size > LARGEST:
        raise NessError(f"{name}: found {size} bytes, at most {LARGEST} are read; make the image smaller")
    return file.read(size)


def is_grey(data: bytes, name: str) -> bool:
    """Whether an image has one channel; only its header is read."""
    return _opened(data, name).mode in ("1", "L", "LA", "I", "I;16", "F")


def size(data: bytes, name: str) -> tuple[int, int]:
    """Height and width of an image; only its header is read."""
    width, height = _opened(data, name).size
    return height, width


def decode(data: bytes, name: str, *, channels: int, to: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """An image as (c, h, w) uint8 of one or three channels, resized bilinearly to (h, w) where that is asked for."""
    picture = _opened(data, name)
    try:
        with warnings.catch_warnings():  # of decoders, about what they mend
            warnings.simplefilter("ignore")
            return _decoded(picture, data, name, channels, to)
    except NessError:
        raise
    except Exception as error:  # decoders raise many things on broken files
        raise NessError(f"{name}: found a broken image ({reason(error)}); replace or remove it") from error


def _decoded(
    picture: Image.Image, data: bytes, name: str, channels: int, to: tuple[int, int] | None
) -> NDArray[np.uint8]:
    if picture.format == "PNG":
        picture.verify()  # the check sums of all chunks; the picture has to be opened again afterwards
        picture = _opened(data, name)
    if picture.mode.startswith("I;16") or picture.mode == "I":
        picture = Image.fromarray((np.asarray(picture).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8))
    picture = picture.convert("L" if channels == 1 else "RGB")
    if to is not None and picture.size != to[::-1]:
        picture = picture.resize(to[::-1], _FILTERS["bilinear"])
    pixels = np.asarray(picture)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def resize(images: NDArray[np.uint8], to: tuple[int, int], how: Filter) -> NDArray[np.uint8]:
    """Grey images (n, 1, h, w), each resized to (h, w) as Pillow does it."""
    result = np.empty((len(images), 1, *to), np.uint8)
    for at, picture in enumerate(images[:, 0]):
        result[at, 0] = np.asarray(Image.fromarray(picture).resize(to[::-1], _FILTERS[how]))
    return result


def _opened(data: bytes, name: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            picture = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Exception as error:
        raise NessError(
            f"{name}: found no image of a format that is read ({', '.join(_FORMATS)}): {reason(error)}; "
            "replace or remove it"
        ) from error
    if picture.width * picture.height > _PIXELS:
        raise NessError(
            f"{name}: found {picture.width}×{picture.height} pixels, at most {_PIXELS} are read; make it smaller"
        )
    return picture

"""Which data sets there are: their published files, addresses, checksums, counts and shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ness.errors import NessError

Kind = Literal["cifar", "idx", "svhn", "notmnist", "mini-imagenet"]


@dataclass(frozen=True)
class Remote:
    """One published file: its name, where to get it, its size in bytes and its MD5 (None: never published)."""

    name: str
    urls: tuple[str, ...]
    size: int
    md5: str | None = None


@dataclass(frozen=True, eq=False)
class DataSet:
    """One data set: what its files are called and what must be in them.

    `files` are downloaded, in this order; without any, `advice` says what to get by hand. `contents` maps the files
    that are read (members of an archive, or what a .gz holds) to the MD5 of their bytes (None: never published), so
    that a repacked archive with the published contents still counts as verified. `pooled` sets come without a split of
    their own: `train` counts all of their images and `test` is 0. `mean` is the mean pixel in 0..1, a fingerprint that
    tells sets of the same shape apart.
    """

    name: str
    title: str
    kind: Kind
    shape: tuple[int, int, int]  # (c, h, w)
    train: int
    test: int
    classes: int
    files: tuple[Remote, ...] = ()
    contents: Mapping[str, str | None] = field(default_factory=dict)
    folders: tuple[str, ...] = ()  # besides `name`: where other tools put the files, below the data folder
    mean: float | None = None
    pooled: bool = False
    advice: str = ""

    @property
    def size(self) -> int:
        """Bytes to download; 0 for a set that has to be fetched by hand."""
        return sum(file.size for file in self.files)

    @property
    def home(self) -> str:
        """The sub-folder of the data folder that downloads go to."""
        return self.name


_IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx_files(base: str, sizes: tuple[int, ...], md5s: tuple[str, ...]) -> tuple[Remote, ...]:
    """The four .gz files of an MNIST-like set under one address."""
    return tuple(
        Remote(f"{name}.gz", (f"{base}{name}.gz",), size, md5)
        for name, size, md5 in zip(_IDX_NAMES, sizes, md5s, strict=True)
    )


_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_STANFORD = "http://ufldl.stanford.edu/housenumbers/"

_CIFAR100 = DataSet(
    name="cifar100",
    title="CIFAR-100",
    kind="cifar",
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    classes=100,
    files=(
        Remote(
            "cifar-100-python.tar.gz",
            (_TORONTO + "cifar-100-python.tar.gz",),
            169_001_437,
            "eb9058c3a382ffc7106e4002c42a8d85",
        ),
    ),
    contents={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    folders=("cifar-100-python",),
    mean=0.478,
)

_CIFAR10 = DataSet(
    name="cifar10",
    title="CIFAR-10",
    kind="cifar",
    shape=(3, 32, 32),
    train=50_000,
    test=10_000,
    classes=10,
    files=(
        Remote(
            "cifar-10-python.tar.gz",
            (_TORONTO + "cifar-10-python.tar.gz",),
            170_498_071,
            "c58f30108f718f92721af3b95e74349a",
        ),
    ),
    contents={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    folders=("cifar-10-batches-py",),
    mean=0.473,
)

_MNIST = DataSet(
    name="mnist",
    title="MNIST",
    kind="idx",
    shape=(1, 28, 28),
    train=60_000,
    test=10_000,
    classes=10,
    files=_idx_files(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (9_912_422, 28_881, 1_648_877, 4_542),
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    contents={
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    folders=("MNIST/raw", "MNIST"),
    mean=0.1307,
)

_FASHION = DataSet(
    name="fashion-mnist",
    title="Fashion-MNIST",
    kind="idx",
    shape=(1, 28, 28),
    train=60_000,
    test=10_000,
    classes=10,
    files=_idx_files(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        (26_421_880, 29_515, 4_422_102, 5_148),
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    contents={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    folders=("FashionMNIST/raw", "FashionMNIST"),
    mean=0.2860,
)

_SVHN = DataSet(
    name="svhn",
    title="SVHN (cropped digits)",
    kind="svhn",
    shape=(3, 32, 32),
    train=73_257,
    test=26_032,
    classes=10,
    files=(
        Remote(
            "train_32x32.mat",
            (_STANFORD + "train_32x32.mat",),
            182_040_794,
            "e26dedcc434d2e4c54c9b2d4a06d8373",
        ),
        Remote(
            "test_32x32.mat",
            (_STANFORD + "test_32x32.mat",),
            64_275_384,
            "eb5a983be6a315427106f1b164d9cef3",
        ),
    ),
    contents={
        "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
        "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
    },
    folders=("SVHN",),
    mean=0.451,
)

_NOTMNIST = DataSet(
    name="notmnist",
    title="notMNIST (small)",
    kind="notmnist",
    shape=(1, 28, 28),
    train=18_724,  # readable images; two more files are empty
    test=0,
    classes=10,
    files=(
        Remote(
            "notMNIST_small.tar.gz",
            (
                "https://commondatastorage.googleapis.com/books1000/notMNIST_small.tar.gz",
                "http://yaroslavvb.com/upload/notMNIST/notMNIST_small.tar.gz",
            ),
            8_458_043,
        ),
    ),
    folders=("notMNIST_small", "notMNIST"),
    mean=0.425,
    pooled=True,
)

_MINI_IMAGENET = DataSet(
    name="mini-imagenet",
    title="MiniImageNet",
    kind="mini-imagenet",
    shape=(3, 84, 84),
    train=50_000,
    test=10_000,
    classes=100,
    folders=("MiniImageNet", "mini_imagenet", "miniimagenet"),
    mean=0.442,
    advice=(
        "MiniImageNet falls under ImageNet's terms and has no address it may be fetched from automatically. Get it "
        "from whoever gave it to you or build it from ImageNet, and put into {home} one of: train.pkl and test.pkl "
        "(dictionaries of 'images' and 'labels', 500 and 100 a class); the three mini-imagenet-cache-*.pkl files; or "
        "one folder a class, named by its WordNet id, with 600 images each (also below train/, val/ and test/). "
        "Or put mini-imagenet.npz (x_train, y_train, x_test, y_test) beside that folder."
    ),
)

CATALOGUE: Mapping[str, DataSet] = {
    data_set.name: data_set for data_set in (_CIFAR100, _CIFAR10, _MNIST, _SVHN, _FASHION, _NOTMNIST, _MINI_IMAGENET)
}

GROUPS: Mapping[str, tuple[str, ...]] = {
    "five-datasets": ("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"),
    "all": tuple(CATALOGUE),
}


def look_up(name: str) -> tuple[DataSet, ...]:
    """The data sets that a name or the name of a group stands for.

    >>> [data_set.title for data_set in look_up("mnist")]
    ['MNIST']
    """
    if name not in CATALOGUE and name not in GROUPS:
        raise NessError(f"no data set {name!r}; there are {', '.join([*CATALOGUE, *GROUPS])}")
    return tuple(CATALOGUE[member] for member in GROUPS.get(name, (name,)))

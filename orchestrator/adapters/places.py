"""Where checkpoints are: a folder, or what a URL names and fsspec reaches, through the part of Path that they need.

    /shared/runs, file:///shared/runs   a folder that every node sees: pathlib's own Path
    s3://bucket/runs, memory://runs     objects: Remote, which behaves like a Path as far as checkpoints go

An object is there whole or not at all and is durable once the store has taken it, so there is nothing to sync and nothing
to rename. It owns that difference and what errors are called. It refuses to know what is in the files.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from ..domain.errors import Refused

BLOCK = 16 << 20
"""Bytes that go to a store at a time."""
_FOLDERS = ("file", "local")


def place(text: str) -> Path:
    """What a user's path or URL means. Raises Refused for a URL that nobody here can open."""
    if "://" not in text:
        return Path(text)
    scheme = text.partition("://")[0]
    if scheme in _FOLDERS:
        return Path(unquote(urlsplit(text).path))
    return cast(Path, Remote(text.rstrip("/")))


@dataclass(frozen=True, slots=True)
class _Stat:
    st_size: int


class Remote:
    """url: without a slash at its end. All calls raise OSError where the store does not do it."""

    def __init__(self, url: str, fs: Any = None, path: str = "") -> None:
        self._url = url
        self._fs, self._path = (fs, path) if fs is not None else _opened(url)

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"Remote({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __lt__(self, other: Remote) -> bool:
        return self._url < other._url

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self._url}/{name}", self._fs, f"{self._path}/{name}")

    @property
    def name(self) -> str:
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> Remote:
        return Remote(self._url.rpartition("/")[0], self._fs, self._path.rpartition("/")[0])

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._url.split("/"))

    def with_name(self, name: str) -> Remote:
        return self.parent / name

    def absolute(self) -> Remote:
        return self

    def expanduser(self) -> Remote:
        return self

    def resolve(self) -> Remote:
        return self

    # --- looking ---------------------------------------------------------------------------------------------------------

    def exists(self) -> bool:
        with self._told():
            return bool(self._fs.exists(self._path))

    def is_dir(self) -> bool:
        with self._told():
            return bool(self._fs.isdir(self._path))

    def is_file(self) -> bool:
        with self._told():
            return bool(self._fs.isfile(self._path))

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> _Stat:
        with self._told():
            return _Stat(int(self._fs.size(self._path)))

    def iterdir(self) -> Iterator[Remote]:
        with self._told():
            found = self._fs.ls(self._path, detail=False)
        yield from (self / path.rstrip("/").rpartition("/")[2] for path in sorted(found))

    def glob(self, pattern: str) -> Iterator[Remote]:
        with self._told():
            found = self._fs.glob(f"{escape(self._path)}/{pattern}")
        yield from (self._below(path) for path in sorted(found))

    def rglob(self, pattern: str) -> Iterator[Remote]:
        """Every file, whatever the pattern."""
        with self._told():
            found = self._fs.find(self._path)
        yield from (self._below(path) for path in sorted(found))

    def _below(self, path: str) -> Remote:
        return self / path.strip("/").removeprefix(self._path.strip("/")).strip("/")

    # --- reading and writing ---------------------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        with self._told():
            return bytes(self._fs.cat_file(self._path))

    def read_range(self, start: int, stop: int) -> bytes:
        """Shorter where it ends before."""
        with self._told():
            return bytes(self._fs.cat_file(self._path, start=start, end=stop))

    def write_bytes(self, content: bytes | bytearray | memoryview) -> None:
        """Whole, or not at all."""
        with self._told():
            self._fs.pipe_file(self._path, bytes(content))

    def create(self) -> Upload:
        with self._told():
            if self._fs.exists(self._path):
                raise FileExistsError(f"{self._url} is there already")
            return Upload(self, self._fs.open(self._path, "wb", block_size=BLOCK))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._told():
                self._fs.rm_file(self._path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self) -> None:
        """Of what is below it."""
        with self._told(), suppress(FileNotFoundError):
            self._fs.rm(self._path, recursive=True)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What a store's own library raises is an OSError to everybody here, with a number: EREMOTEIO where it has none."""
        try:
            yield
        except (FileNotFoundError, FileExistsError, Refused):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise OSError(errno.EREMOTEIO, f"{self._url}: {type(error).__name__}: {error}") from error


class Upload:
    """An object on its way: it is there once `commit` returns."""

    def __init__(self, at: Remote, file: Any) -> None:
        self._at = at
        self._file = file
        self._is_over = False

    def write(self, content: bytes | bytearray | memoryview) -> None:
        with self._at._told():
            self._file.write(content)

    def commit(self) -> None:
        with self._at._told():
            self._file.close()
        self._is_over = True

    def close(self) -> None:
        """What was not committed is dropped; a store that keeps half of it keeps what nobody names."""
        if not self._is_over:
            self._is_over = True
            with suppress(Exception):
                self._file.discard()
            with suppress(Exception):
                self._file.closed = True  # else it is sent after all when it is collected


def _opened(url: str) -> tuple[Any, str]:
    try:
        import fsspec  # only where there is a URL: a folder needs nothing

        # What was listed before is no news: others write there too.
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=False)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise Refused(
            f"{url!r} needs a package that is not installed here ({error}); install everstep[{scheme}] on every node, or "
            "name a folder that every node sees"
        ) from error
    except ValueError as error:
        said = f"{url!r} is no place that can be opened ({error}); give a folder, or a URL that fsspec knows"
        raise Refused(said) from error
    return fs, str(path).rstrip("/")

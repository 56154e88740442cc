"""Blocks over TCP: what is there comes, what is being written is waited for, strangers get nothing."""

import threading
import time

import pytest

from octavo.base.block_files import BlockFiles, BlockName
from octavo.base.block_link import BlockClient, BlockServer, NoBlocks
from octavo.base.errors import ConfigError
from octavo.base.link import Place, free_port

KIND = b"k" * 32
NAMES = [BlockName(bytes([i]) * 32, 0, 0) for i in range(4)]


@pytest.fixture
def place():
    return Place("127.0.0.1", free_port("127.0.0.1"), "a key of sixteen characters", 5.0)


@pytest.fixture
def files(tmp_path, place):
    files = BlockFiles(str(tmp_path), KIND, 1 << 20)
    server = BlockServer(place, files, KIND)
    yield files
    server.close()


def read(place, kind=KIND, num_bytes=8, patience_s=0.3, names=NAMES):
    client = BlockClient(place, kind)
    try:
        return client.read(names, num_bytes, patience_s)
    finally:
        client.close()


def test_blocks_come_up_to_the_first_that_is_not_there(files, place):
    for i in (0, 1, 3):
        files.write(NAMES[i], bytes([i]) * 8)
    assert read(place) == [b"\0" * 8, b"\1" * 8]


def test_blocks_that_are_being_written_are_waited_for(files, place):
    def write():
        for i, name in enumerate(NAMES):
            time.sleep(0.1)
            files.write(name, bytes([i]) * 8)

    writing = threading.Thread(target=write)
    writing.start()
    assert read(place, patience_s=2) == [bytes([i]) * 8 for i in range(4)]
    writing.join()


def test_another_kind_another_key_and_nobody_give_nothing(files, place):
    files.write(NAMES[0], b"x" * 8)
    with pytest.raises(NoBlocks, match="its model, options or version differ"):
        read(place, kind=b"o" * 32)
    with pytest.raises(NoBlocks, match="has not answered"):
        read(Place(place.host, place.port, "another key of sixteen", 5.0))
    with pytest.raises(NoBlocks, match="has not answered"):
        read(Place(place.host, free_port(place.host), place.key, 5.0))
    assert read(place, names=NAMES[:1]) == [b"x" * 8], "and harm nobody"


def test_a_port_in_use_is_refused(files, place):
    with pytest.raises(ConfigError, match=r"kv_ip='127.0.0.1' and kv_port=\d+ cannot be listened at"):
        BlockServer(place, files, KIND)

"""The accounting database of a Slurm cluster: mariadbd and slurmdbd, on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from drivers import free_ports
from waiting import eventually

_PROGRAMS = ("mariadbd", "mariadb-install-db", "my_print_defaults", "slurmdbd", "sacct", "sacctmgr")

_DATABASE = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""

_CONFIG = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
MinJobAge=5
"""
"""The password is the socket of munged, as Slurm has it.

The controller forgets a task after 5 s, and then its state has to come from the database.
"""


@contextlib.contextmanager
def running_accounting(folder: Path) -> Iterator[str]:
    """A database as long as the block runs. Skips where a program is not installed.

    Args:
        folder: of the cluster, whose munged runs; `slurm.conf` will be there.

    Yields:
        lines of slurm.conf.
    """
    if lacking := [name for name in _PROGRAMS if shutil.which(name) is None]:
        pytest.skip(
            f"{', '.join(lacking)}: not found; "
            "apt-get install --no-install-recommends slurmdbd mariadb-server-core "
            "mariadb-client-core"
        )
    port, storage_port = free_ports(2)
    password = secrets.token_hex(16)
    data = folder / "mariadb"
    subprocess.run(
        ["mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root",
         "--auth-root-authentication-method=normal", "--skip-test-db"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    users = folder / "users.sql"
    users.write_text(
        f"CREATE USER 'slurm'@'%' IDENTIFIED BY '{password}';\n"
        "GRANT ALL ON slurm.* TO 'slurm'@'%';\n"
    )
    config = folder / "slurmdbd.conf"
    config.touch(0o600)  # slurmdbd refuses a file that others can read
    config.write_text(
        _DATABASE.format(
            folder=folder, host=socket.gethostname(), port=port, storage_port=storage_port,
            password=password,
        )
    )  # fmt: skip
    database = [
        "mariadbd", "--no-defaults", f"--datadir={data}", "--user=root",
        "--bind-address=127.0.0.1", f"--port={storage_port}", f"--socket={folder}/mariadb.socket",
        f"--pid-file={folder}/mariadb.pid", f"--init-file={users}",
        "--innodb-buffer-pool-size=32M",
    ]  # fmt: skip
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with contextlib.ExitStack() as stack:
        for command, listens in ((database, storage_port), (["slurmdbd", "-D"], port)):
            with (folder / f"{command[0]}.log").open("ab") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(_end, process)
            _wait_for(listens, process, folder / f"{command[0]}.log")
        yield _CONFIG.format(port=port, folder=folder)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    def listens() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    eventually(listens, 120, process, lambda: log.read_text(errors="replace")[-2000:])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

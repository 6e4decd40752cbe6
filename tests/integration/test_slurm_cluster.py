"""executor=slurm on a real Slurm without accounting: whatever happens, the same rows."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from drivers import SYSTEM_TEST, extract_in_process, running_driver, store_digests
from slurm_cluster import SLURM, SlurmCluster, processes_of_tasks
from tiny_model import write_images
from waiting import eventually

pytestmark = SYSTEM_TEST

pytest_plugins = ["slurm_fixtures"]


def test_the_rows_are_those_of_a_local_run(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.workers=3") as driver:
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)
    assert "Slurm accounting storage is disabled" not in driver.output
    assert not Path("store/jobs").exists()


def test_a_folder_with_characters_that_slurm_replaces_in_paths_has_the_logs(
    photos: Path, cluster: SlurmCluster
) -> None:
    folder = Path("pl%Aces\\x y")
    with running_driver(*SLURM, "executor.workers=2", f"executor.folder={folder}") as driver:
        driver.wait_for_parts(1)
        assert len(list(folder.glob("*/*.log"))) == 2
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)


def test_a_task_that_is_cancelled_is_submitted_again(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.workers=2", pause_s=2) as driver:
        driver.wait_for_parts(1)
        cluster.ask("scancel", cluster.tasks("RUNNING")[-1])
        line = driver.wait_for("submitted again", 60)
        assert driver.finish() == 0, driver.output
    assert "was ended by SIGTERM" in line or "CANCELLED" in line
    assert store_digests() == extract_in_process(photos)


def test_a_task_that_is_cancelled_while_it_waits_is_submitted_again(
    photos: Path, cluster: SlurmCluster
) -> None:
    with running_driver(*SLURM, "executor.workers=3", "executor.cpus=2", pause_s=12) as driver:
        driver.wait_for("submitted 3 tasks")
        driver.wait_for("wait in the queue", 60)
        cluster.ask("scancel", cluster.tasks("PENDING")[0])
        line = driver.wait_for("submitted again", 90)
        # Slurm forgets at once a task of an array that never had a job of its own.
        assert "was lost (CANCELLED" in line or "no longer known to Slurm" in line
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)


def test_a_time_limit_shorter_than_the_work_is_no_end(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    photos = write_images(tmp_path / "photos", 96)
    with running_driver(
        *SLURM, "executor.workers=1", "executor.time_limit_min=1", pause_s=4
    ) as driver:
        assert driver.finish(800) == 0, driver.output
    limits = driver.lines("reached its time limit (ready after")
    assert len(limits) >= 2, driver.output
    assert store_digests() == extract_in_process(photos)


def test_a_time_limit_shorter_than_a_part_says_what_to_change(
    photos: Path, cluster: SlurmCluster
) -> None:
    limit = ("executor.workers=1", "executor.time_limit_min=1", "part_rows=32", "batch_size=2")
    with running_driver(*SLURM, *limit, pause_s=5) as driver:
        assert driver.finish(800) == 1, driver.output
    last = driver.output.strip().splitlines()[-1]
    assert "reached its time limit" in last
    assert "the 21 rows of a part. Raise executor.time_limit_min, or" in last
    assert "overwrite=true part_rows=4" in last
    assert "Traceback" not in driver.output


def test_a_wrong_partition_is_one_line(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.sbatch={partition: mian}") as driver:
        assert driver.finish() == 2
    last = driver.output.strip().splitlines()[-1]
    assert "Slurm does not take the tasks: sbatch: error: invalid partition specified: mian" in last
    assert "submitted by sbatch --partition=mian --parsable " in last
    assert "Traceback" not in driver.output
    assert not list(Path().glob("**/result-*"))


def test_what_no_node_has_is_refused_or_said(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.sbatch={gres: gpu:1}") as driver:
        assert driver.finish() == 2
    assert "Slurm does not take the tasks: " in driver.output, driver.output
    assert " --gres=gpu:1 " in driver.output.strip().splitlines()[-1]
    assert "Traceback" not in driver.output


def test_a_misspelt_option_of_sbatch_is_named_by_sbatch(
    photos: Path, cluster: SlurmCluster
) -> None:
    with running_driver(*SLURM, "executor.sbatch={partitoin: main}") as driver:
        assert driver.finish() == 2
    last = driver.output.strip().splitlines()[-1]
    assert "not take the tasks: sbatch: unrecognized option '--partitoin=main'" in last
    assert not list(Path().glob("**/result-*"))


def test_why_a_task_waits_is_said(photos: Path, cluster: SlurmCluster) -> None:
    given = (
        "executor.sbatch={partition: brief}",
        "executor.time_limit_min=3",
        "executor.workers=2",
    )
    with running_driver(*SLURM, *given) as driver:
        line = driver.wait_for("wait in the queue", 90)
        assert line == "2 of 2 tasks wait in the queue: PartitionTimeLimit (2)"
        driver.process.send_signal(signal.SIGINT)
        assert driver.finish(60) == 130
    eventually(lambda: not cluster.tasks(), 60, output=lambda: "a task was left in the queue")


def test_without_a_controller_it_is_one_line(
    photos: Path, cluster: SlurmCluster, tmp_path: Path
) -> None:
    config = (cluster.folder / "slurm.conf").read_text()
    nobody = tmp_path / "slurm.conf"
    nobody.write_text(
        "".join(
            "SlurmctldPort=9\n" if line.startswith("SlurmctldPort") else line
            for line in config.splitlines(keepends=True)
        )
    )
    with running_driver(*SLURM, environment={"SLURM_CONF": str(nobody)}) as driver:
        assert driver.finish() == 1
    assert len(driver.output.strip().splitlines()) == 1
    assert driver.output.startswith(
        "executor=slurm: Slurm does not answer (slurm_load_partitions: Unable to contact"
    )
    assert not Path("store").exists()


def test_a_controller_that_goes_away_in_mid_run_is_waited_for(
    photos: Path, cluster: SlurmCluster
) -> None:
    # Squeue is asked every 10 s and waits 10 s for an answer: the run must still be on by then.
    with running_driver(*SLURM, "executor.workers=1", pause_s=6) as driver:
        driver.wait_for_parts(1)
        cluster.stop("slurmctld")
        try:
            driver.wait_for("the controller of Slurm does not answer", 120)
        finally:
            cluster.start("slurmctld")
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)


def test_a_task_that_is_killed_says_its_state(photos: Path, cluster: SlurmCluster) -> None:
    with running_driver(*SLURM, "executor.workers=1", pause_s=2) as driver:
        driver.wait_for_parts(1)
        pids = processes_of_tasks(Path("store"))
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        line = driver.wait_for("submitted again", 60)
        assert "was lost (FAILED" in line
        assert driver.finish() == 0, driver.output
    assert store_digests() == extract_in_process(photos)

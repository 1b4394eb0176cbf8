"""The variables that launchers set for a rank."""

from __future__ import annotations

import pytest

from paceline.environment import environment
from paceline.errors import UsageError


def test_variables_of_torchrun() -> None:
    detected = environment(
        {
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "node7",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "run",
            "TORCHELASTIC_RESTART_COUNT": "2",
            "PACELINE_ALGORITHM": "ring",
            "SLURM_PROCID": "9",
        }
    )
    assert (detected.rank, detected.world_size, detected.local_rank, detected.local_world_size) == (3, 4, 1, 2)
    assert (detected.master_addr, detected.master_port, detected.has_agent_store) == ("node7", 29500, True)
    assert (detected.run_id, detected.algorithm) == ("run/2", "ring")


def test_variables_of_mpirun_override_variables_of_slurm() -> None:
    detected = environment(
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "1",
        }
    )
    assert (detected.rank, detected.world_size, detected.local_rank, detected.local_world_size) == (1, 2, 1, 2)


def test_mpich_is_recognized_by_its_variable_of_the_local_rank() -> None:
    variables = {"PMI_RANK": "1", "PMI_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    found = environment({**variables, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 4, 1, 2)
    assert found.job is None  # on several machines, MPICH sets no variable that names the job
    assert environment({**variables, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}).job
    found = environment({**variables, "SLURM_PROCID": "1", "SLURM_NTASKS": "4"})  # srun --mpi=pmi2
    assert (found.rank, found.world_size, found.local_rank, found.job) == (1, 4, None, None)


def test_variables_of_horovodrun() -> None:
    variables = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "1"}
    found = environment({**variables, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "a", "HOROVOD_GLOO_RENDEZVOUS_PORT": "5"})
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (1, 2, 0, 1)
    assert found.job == "a/5"
    assert environment({**variables, "RANK": "0", "WORLD_SIZE": "3"}).world_size == 3
    found = environment({"HOROVOD_FUSION_THRESHOLD": "0", "HOROVOD_CACHE_CAPACITY": "7", "HOROVOD_ELASTIC": "1"})
    assert (found.horovod_fusion_threshold, found.horovod_cache_capacity, found.is_horovod_elastic) == (0, 7, True)
    assert environment({"HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}).horovod_timeout_s == 30
    found = environment(
        {"HOROVOD_START_TIMEOUT": "9", "HOROVOD_LOG_LEVEL": "INFO", "HOROVOD_DISABLE_GROUP_FUSION": "1"}
    )
    assert (found.horovod_start_timeout_s, found.horovod_log_level, found.has_horovod_group_fusion) == (
        9,
        "info",
        False,
    )
    assert environment({"HOROVOD_STALL_CHECK_DISABLE": "0"}).is_horovod_stall_check_disabled is False


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ("RANK=2 WORLD_SIZE=2", "RANK is 2 and WORLD_SIZE is 2"),
        ("WORLD_SIZE=0", "RANK is missing and WORLD_SIZE is 0"),
        ("RANK=0 WORLD_SIZE=4 LOCAL_RANK=3 LOCAL_WORLD_SIZE=2", "LOCAL_RANK is 3 and LOCAL_WORLD_SIZE is 2"),
        ("RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE is 4 and WORLD_SIZE is 1"),
        ("OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_RANK is 1 and OMPI_COMM_WORLD_SIZE is missing"),
        ("PMI_RANK=3 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", "PMI_RANK is 3 and PMI_SIZE is 2"),
        ("PMI_SIZE=2 MPI_LOCALRANKID=0", "PMI_RANK is missing and PMI_SIZE is 2"),
        ("SLURM_PROCID=8 SLURM_NTASKS=8", "SLURM_PROCID is 8 and SLURM_NTASKS is 8"),
        ("SLURM_PROCID=1", "SLURM_PROCID is 1 and SLURM_NTASKS is missing"),
        ("PET_NODE_RANK=0", "PET_NODE_RANK is 0 and PET_NNODES is missing"),
        ("PET_NNODES=0", "PET_NNODES is '0'"),
        ("HOROVOD_STALL_CHECK_DISABLE=yes", "HOROVOD_STALL_CHECK_DISABLE is 'yes'"),
        ("HOROVOD_LOG_LEVEL=loud", "HOROVOD_LOG_LEVEL is 'loud', expected trace"),
        ("HOROVOD_ELASTIC_TIMEOUT=0", "HOROVOD_ELASTIC_TIMEOUT is '0'"),
        ("PET_NPROC_PER_NODE=0", "PET_NPROC_PER_NODE is '0'"),
        ("MASTER_PORT=65536 PET_MASTER_PORT=1", " MASTER_PORT is '65536'"),
        ("PET_MASTER_PORT=0", "PET_MASTER_PORT is '0'"),
    ],
)
def test_wrong_variables_are_named(variables: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        environment(dict(variable.split("=") for variable in variables.split()))


def test_a_slurm_script_without_ntasks_has_one_rank() -> None:
    detected = environment({"SLURM_PROCID": "0"})
    assert (detected.rank, detected.world_size) == (0, 1)
    detected = environment({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "5"})
    assert (detected.rank, detected.world_size) == (0, 5)


def test_variables_of_slurm() -> None:
    detected = environment({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"})
    assert (detected.rank, detected.world_size, detected.local_rank, detected.local_world_size) == (5, 8, 1, None)


def test_without_a_rank_there_are_no_other_settings() -> None:
    detected = environment({"RANK": "", "WORLD_SIZE": "2"})
    assert (detected.rank, detected.world_size, detected.master_port, detected.run_id, detected.has_agent_store) == (
        None,
        2,
        None,
        None,
        0,
    )


@pytest.mark.parametrize("text", ["x", "-1", "1.5", "٣"])
def test_invalid_numbers_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match=r"RANK is .* a whole number"):
        environment({"RANK": text})


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(environment({"PACELINE_TOKEN": "secret", "RANK": "1"}))


def test_programs_of_one_host_are_distinguished() -> None:
    assert environment({"PMIX_NAMESPACE": "prterun-1@1"}).job == "prterun-1@1"
    assert environment({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}).job == "7/0"
    assert environment({"SLURM_JOB_ID": ""}).job is None

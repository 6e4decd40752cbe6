from .job_folder import WorkerSpec as WorkerSpec
from .registry import EXECUTORS as EXECUTORS
from .registry import Executor as Executor
from .registry import run_distributed as run_distributed

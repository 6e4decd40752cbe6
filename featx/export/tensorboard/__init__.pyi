from .events import RunEvents as RunEvents
from .events import require_tensorboard as require_tensorboard

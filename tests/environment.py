"""Where the tests are, and in what environment they start the command."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COMMAND_ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(REPOSITORY / "src"),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "80",
}

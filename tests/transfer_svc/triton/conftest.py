"""As in the kernels' folder: Triton's interpreter first, or the reason why these tests are skipped."""

from tests.kernels.triton.conftest import *  # noqa: F403

"""The model engine both workers run: scheduler, model, KV memory, sampler. No service and no text here.

OpenMP's threads are told to sleep at barriers instead of spinning, before torch loads OpenMP: several workers on one
host otherwise burn each other's cores (measured: a 16-row linear on 2 busy cores takes 0.3 ms instead of 7.6 ms).
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

"""What this router calls itself towards workers, so that they can tell when it is gone."""

import secrets

# Of this run: a router that is started again is another one, whose requests are others.
ROUTER_ID = secrets.token_hex(8)

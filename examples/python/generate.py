"""Ten lines of Python: stream a completion. Usage: generate.py [HOST:PORT]"""

import sys

from pagewire import Client

target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
with Client(target) as client:
    for chunk in client.generate("The capital of France is", max_tokens=16, temperature=0):
        print(chunk.text, end="", flush=True)
print()

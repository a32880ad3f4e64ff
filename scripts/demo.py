"""`make demo`: the whole system on this machine, one prompt through the public API, a clean shutdown."""

import re
import signal
import subprocess
import sys

PROMPT = "The capital of France is"
READY = re.compile(r"ready\s+(\S+:\d+)")


def main() -> int:
    up = [sys.executable, "-m", "pagewire", "up", "--model", "demo", "--port", "0"]
    print("$ pagewire up --model demo", flush=True)
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True) as system:
        assert system.stdout is not None
        target = None
        try:
            for line in system.stdout:
                print(line, end="", flush=True)
                if found := READY.search(line):
                    target = found.group(1)
                    break
            if target is None:
                return system.wait() or 1
            for extra in (
                ["--max-tokens", "48", "--temperature", "0"],
                ["--max-tokens", "8", "--temperature", "0", "--json"],
            ):
                print(f'\n$ pagewire generate "{PROMPT}" --target {target} {" ".join(extra)}', flush=True)
                code = subprocess.run(
                    [sys.executable, "-m", "pagewire", "generate", PROMPT, "--target", target, *extra], check=False
                ).returncode
                if code:
                    return code
        finally:
            if system.poll() is None:
                system.send_signal(signal.SIGTERM)
        code = system.wait(timeout=60)
        print("\nshut down cleanly" if code == 0 else f"\nshutdown failed with exit code {code}")
        return code


if __name__ == "__main__":
    sys.exit(main())

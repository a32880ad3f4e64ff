"""Renders and lints the chart with Helm itself (PyPI helm-python-sdk), in a process of its own: it brings Go's runtime.

python -m tests.deploy.helm lint|render '{"values": …}' prints JSON.
"""

import json
import sys
from pathlib import Path

CHART = Path(__file__).resolve().parents[2] / "deploy/helm/pagewire"

if __name__ == "__main__":
    import helm_python

    command, values = sys.argv[1], json.loads(sys.argv[2])
    if command == "lint":
        print(json.dumps(helm_python.lint(str(CHART))))
    else:
        with helm_python.Chart.load(str(CHART)) as chart:
            try:
                chart.validate_schema(values)
                print(json.dumps(chart.render(values, name="demo", namespace="llm")))
            except helm_python.HelmError as error:
                sys.exit(f"{error}")

#!/usr/bin/env bash
# Run in the new environment, from the repository root. Editable: jobs must run the code that the rules' digests see.
set -euo pipefail
python -m pip install --quiet --constraint requirements.lock --editable '.[workflow,benchmark]'

#!/bin/bash
# The share of digits in what the agent wrote.
cd /app
[ "$(cat start.txt)" = start ] || exit 1
text=$(cat answer.txt 2>/dev/null)
digits=${text//[^0-9]/}
python3 -c "import sys; print(len(sys.argv[1]) / max(1, len(sys.argv[2])))" "$digits" "$text" > /logs/verifier/reward.txt

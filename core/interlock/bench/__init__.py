"""Load generation and comparison: closed loops, exact lengths, paired repeats, ablation.

`prompts` cuts real text, `drive` and `http_target` keep requests in flight, `metrics` turns
arrival times into numbers, `session` holds one subprocess per configuration, `compare`
alternates them and `report` prints what came out.
"""

"""Two papers' comparisons on one GPU: "Cautiously aggressive GPU space sharing" (Pan 2021), Gilman and Walls 2021.

`plan` chooses runs and says what they take, `collecting` makes those of the first (sets of programs, by what
`gpushare calibrate` measures with), `turnaround` those of the second (an inference beside training, by the
launcher of bench/sharing), `report` makes tables and a figure of the raw results.
"""

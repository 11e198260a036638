"""The studies: pairs of runs, what is measured on them, claims and verdicts.

`launch.reproduce` is the command. From top to bottom:

  plan         what a study consists of
  studies      the studies: which runs, and how many
  measure      summary tables of every run, kept so that nothing is done twice
  evidence     these tables, looked up by run and point
  claims/      one claim after the other: what is tested, from the evidence
  robustness   claims a to c under other choices of what is measured
  comparisons  trainings side by side
  plots        the figures
  content      all of a study's results, and the files they are written to
  results      these files, read again
  page         the pages, and the table of claims in Markdown
  estimate     how long trainings will take here
  trainings    trains what is missing
  reproduction puts all of this together

A further study is one more entry in `studies`, a further claim one more entry
in a file of `claims`.
"""

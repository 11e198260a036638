"""What ablations and stacks of attention matrices are called in tables."""

# (skip, ffn), see `encoder.Ablation`.
ABLATIONS = {
  (True, True): 'skip on, FFN on',
  (True, False): 'skip on, FFN off',
  (False, True): 'skip off, FFN on',
  (False, False): 'skip off, FFN off',
}


def iterations(num_iters: int, closed: bool = True) -> str:
  """Attention after so many Sinkhorn iterations.

  Args:
    num_iters: number of iterations.
    closed: whether a last row update closes the rows.
  """
  ending = '' if closed else ', ending on columns'
  return f'{num_iters} iteration{"s" * (num_iters != 1)}{ending}'

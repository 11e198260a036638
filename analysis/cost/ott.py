"""Sinkhorn by ott-jax, to compare with; see requirements-dev.txt.

Cuturi et al. 2022, "Optimal Transport Tools" (arXiv 2201.12324). With cost
``-C``, unit epsilon and uniform marginals it computes the same weights, divided
by the number of tokens. It updates columns first, so it is started with the
row update that our iterations start with; both then end with one, and
`num_iters` of its iterations are `num_iters` of ours.
"""

import jax
import jax.numpy as jnp
from ott.geometry import geometry
from ott.problems.linear import linear_problem
from ott.solvers.linear import implicit_differentiation
from ott.solvers.linear import sinkhorn as ott_sinkhorn


def sinkhorn(logits: jax.Array, *, num_iters: int, implicit: bool) -> jax.Array:
  """`sinkformer_jax.sinkhorn.sinkhorn` of square matrices without a mask.

  Args:
    logits: ``[matrices, n, n]``.
    num_iters: iterations, always all of them.
    implicit: differentiates the fixed point (exact only where the iterations
      have converged) instead of the iterations.

  Returns:
    Weights ``[matrices, n, n]``.
  """
  # A constant added to all of f and taken from all of g changes nothing, so the
  # linear system is singular. Its documentation advises this regularization,
  # which leaves the solution as it is; without it small matrices give NaN.
  implicit_diff = implicit_differentiation.ImplicitDiff(
    solver_kwargs={'ridge_kernel': 0.01}
  )
  solver = ott_sinkhorn.Sinkhorn(
    threshold=0.0,
    min_iterations=num_iters,
    max_iterations=num_iters,
    # How often it looks at its error: at the end.
    inner_iterations=num_iters,
    implicit_diff=implicit_diff if implicit else None,
  )

  def one(logits):
    length = len(logits)
    problem = linear_problem.LinearProblem(
      geometry.Geometry(cost_matrix=-logits, epsilon=1.0)
    )
    f = -jax.nn.logsumexp(logits, -1) - jnp.log(length)
    result = solver(problem, init=(f, jnp.zeros(length)))
    return length * result.matrix

  return jax.vmap(one)(logits)

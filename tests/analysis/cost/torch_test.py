"""The models that are compared are the same model."""

import jax
import numpy as np
import pytest

torch = pytest.importorskip('torch')

from analysis.common import machine  # noqa: E402
from analysis.cost import model as cost_model  # noqa: E402
from analysis.cost import setup as cost_setup  # noqa: E402
from analysis.cost import torch as cost_torch  # noqa: E402
from sinkformer_jax import models  # noqa: E402
from sinkformer_jax import sinkhorn  # noqa: E402


@pytest.mark.parametrize('form', ['softmax', 'sinkhorn'])
def test_same_training(form):
  model = cost_setup.PRESETS['tiny'].model
  setting = cost_model.Setting(model, tokens=5, batch=4).with_model(
    normalizer=form
  )
  params = cost_model.create_params(setting)
  # Biases and scales start at 0 and 1, where an exchange would not show.
  params = jax.tree.map(
    lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape),
    params,
  )
  theirs = cost_torch.VisionTransformer(
    setting.model.to_dict(), setting.patches, cost_model.NUM_CLASSES
  )
  sizes = [x.size for x in jax.tree.leaves(params)]
  assert sum(x.numel() for x in theirs.parameters()) == sum(sizes)

  cost_torch.load(theirs, jax.tree.map(np.asarray, params))
  batch = cost_model.create_batch(setting)
  patches = models.split_patches(batch['image'], setting.model.patch_size)
  their_step = cost_torch.training(
    theirs,
    torch.tensor(np.array(patches)),
    torch.tensor(np.array(batch['label'])).long(),
    cost_model.LEARNING_RATE,
  )
  our_step = cost_model.training(setting, params)
  losses = [(float(our_step()), float(their_step())) for _ in range(3)]
  # The later losses depend on gradients and updates too.
  for ours, other in losses:
    assert ours == pytest.approx(other, abs=1e-5)
  assert losses[0][0] - losses[2][0] > 1e-3


@pytest.mark.parametrize('scale', [1, 5])
def test_same_sinkhorn(scale):
  rng = np.random.default_rng(0)
  logits = (scale * rng.normal(size=(3, 9, 9))).astype(np.float32)
  cotangent = rng.normal(size=logits.shape).astype(np.float32)
  ours, vjp = jax.vjp(lambda x: sinkhorn.sinkhorn(x, 7), logits)
  theirs, gradient = cost_torch.sinkhorn_call(
    torch.tensor(logits), torch.tensor(cotangent), 7, gradient=True
  )()
  np.testing.assert_allclose(theirs.numpy(), ours, atol=1e-6)
  np.testing.assert_allclose(
    gradient.numpy(), vjp(cotangent)[0], atol=5e-6 * scale
  )
  value, nothing = cost_torch.sinkhorn_call(
    torch.tensor(logits), torch.tensor(cotangent), 7, gradient=False
  )()
  assert torch.equal(value, theirs)
  assert nothing is None


def test_memory_of_autograd():
  # It keeps a matrix for each of 2 * 50 updates; 64 of 50 x 50 are 0.64 MB.
  memory_mb = machine.grown(
    cost_torch.random_sinkhorn,
    small={'shape': (1, 50, 50), 'num_iters': 1, 'gradient': True},
    full={'shape': (64, 50, 50), 'num_iters': 50, 'gradient': True},
  )['memory_mb']
  assert 64 < memory_mb < 2 * 64

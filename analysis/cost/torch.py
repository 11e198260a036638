"""The same encoder and the same Sinkhorn in eager PyTorch, to compare with.

Written the way that was fastest among those tried in eager mode on a CPU: one
product for queries, keys and values, PyTorch's fused attention for softmax, its
fused SGD, and for Sinkhorn `log_softmax` over rows and columns in turn (one
kernel and one stored matrix for each update; two to three times as fast as
updates of the potentials by `logsumexp`). PyTorch is not needed by anything
else; see requirements-dev.txt.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
import torch.nn.functional as F

from analysis.common import machine


def sinkhorn(logits: torch.Tensor, num_iters: int) -> torch.Tensor:
  """Sinkhorn in log space, closed by a row update; for square matrices.

  Args:
    logits: ``[..., n, n]``.
    num_iters: row and column updates before the closing row update.

  Returns:
    Weights ``[..., n, n]``.
  """
  for _ in range(num_iters):
    logits = torch.log_softmax(torch.log_softmax(logits, -1), -2)
  return torch.softmax(logits, -1)


class Block(nn.Module):
  """One pre-LN layer; `num_iters` of 0 is softmax."""

  def __init__(self, width, num_heads, ffn_dim, num_iters):
    super().__init__()
    self.num_heads, self.num_iters = num_heads, num_iters
    self.attention_norm = nn.LayerNorm(width, eps=1e-6)
    self.query_key_value = nn.Linear(width, 3 * width)
    self.out = nn.Linear(width, width)
    self.ffn_norm = nn.LayerNorm(width, eps=1e-6)
    self.expand = nn.Linear(width, ffn_dim)
    self.contract = nn.Linear(ffn_dim, width)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """``[batch, length, width] -> [batch, length, width]``."""
    x = x + self._attend(self.attention_norm(x))
    hidden = F.gelu(self.expand(self.ffn_norm(x)), approximate='tanh')
    return x + self.contract(hidden)

  def _attend(self, x):
    batch, length, width = x.shape
    heads = self.query_key_value(x).view(batch, length, 3, self.num_heads, -1)
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    if self.num_iters:
      query = query * query.shape[-1] ** -0.5
      weights = sinkhorn(query @ key.transpose(-1, -2), self.num_iters)
      mixed = weights @ value
    else:
      mixed = F.scaled_dot_product_attention(query, key, value)
    return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class VisionTransformer(nn.Module):
  """`sinkformer_jax.models.VisionTransformer` with a class token, pre-LN."""

  def __init__(self, model: Mapping[str, Any], patches: int, num_classes: int):
    """Makes the model.

    Args:
      model: the fields of a section `config.model`.
      patches: patches of an image.
      num_classes: number of classes.
    """
    super().__init__()
    width = model['width']
    softmax = model['normalizer'] == 'softmax'
    self.patch_embedding = nn.Linear(model['patch_size'] ** 2, width)
    self.cls = nn.Parameter(torch.randn(1, 1, width))
    self.positions = nn.Parameter(torch.randn(1, patches + 1, width))
    self.blocks = nn.Sequential(
      *(
        Block(
          width,
          model['num_heads'],
          model['ffn_dim'],
          0 if softmax else model['num_iters'],
        )
        for _ in range(model['num_layers'])
      )
    )
    self.norm = nn.LayerNorm(width, eps=1e-6)
    self.head = nn.Linear(width, num_classes)

  def forward(self, patches: torch.Tensor) -> torch.Tensor:
    """``[batch, patches, pixels] -> [batch, num_classes]``."""
    x = self.patch_embedding(patches)
    x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.positions
    return self.head(self.norm(self.blocks(x))[:, 0])


def load(model: VisionTransformer, params: Mapping[str, Any]) -> None:
  """Gives a model the parameters of the Flax model, as NumPy arrays."""

  def copy(linear, *dense):
    # Flax keeps kernels as [in, out].
    kernel = np.concatenate([x['kernel'] for x in dense], -1)
    linear.weight.data = torch.tensor(kernel.T.copy())
    linear.bias.data = torch.tensor(np.concatenate([x['bias'] for x in dense]))

  def copy_norm(norm, params):
    norm.weight.data = torch.tensor(np.array(params['scale']))
    norm.bias.data = torch.tensor(np.array(params['bias']))

  copy(model.patch_embedding, params['patch_embedding'])
  model.cls.data = torch.tensor(np.array(params['cls']))
  model.positions.data = torch.tensor(np.array(params['positions']))
  copy(model.head, params['head'])
  copy_norm(model.norm, params['encoder']['norm'])
  for number, block in enumerate(model.blocks):
    layer = _slice(params['encoder']['blocks'], number)
    attention = layer['attention']
    copy(
      block.query_key_value, *(attention[x] for x in ('query', 'key', 'value'))
    )
    copy(block.out, attention['out'])
    copy(block.expand, layer['ffn']['expand'])
    copy(block.contract, layer['ffn']['contract'])
    copy_norm(block.attention_norm, layer['attention_norm'])
    copy_norm(block.ffn_norm, layer['ffn_norm'])


def _slice(tree, number):
  if isinstance(tree, Mapping):
    return {name: _slice(x, number) for name, x in tree.items()}
  return tree[number]


def training(
  model: VisionTransformer,
  patches: torch.Tensor,
  labels: torch.Tensor,
  learning_rate: float,
) -> Callable[[], torch.Tensor]:
  """A training that makes one step of plain SGD a call, on all threads."""
  torch.set_num_threads(machine.num_threads())
  optimizer = torch.optim.SGD(model.parameters(), learning_rate, fused=True)

  def call():
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(patches), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()

  return call


def random_training(
  model: Mapping[str, Any], patches: int, num_classes: int, batch: int
) -> Callable[[], torch.Tensor]:
  """A `training` of a fresh model on random images."""
  pixels = torch.randn(batch, patches, model['patch_size'] ** 2)
  labels = torch.zeros(batch, dtype=torch.long)
  vit = VisionTransformer(model, patches, num_classes)
  return training(vit, pixels, labels, 1e-3)


def random_sinkhorn(
  shape: Sequence[int], num_iters: int, gradient: bool
) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
  """A `sinkhorn_call` on random logits."""
  logits = torch.randn(*shape)
  return sinkhorn_call(logits, torch.randn_like(logits), num_iters, gradient)


def sinkhorn_call(
  logits: torch.Tensor,
  cotangent: torch.Tensor,
  num_iters: int,
  gradient: bool,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
  """A call of `sinkhorn` on all threads: its value, its gradient or None."""
  torch.set_num_threads(machine.num_threads())

  def call():
    x = logits.detach().requires_grad_(gradient)
    weights = sinkhorn(x, num_iters)
    if gradient:
      weights.backward(cotangent)
    return weights.detach(), x.grad

  return call

"""Muon for the linear weights, AdamW for embedding and norms, and the WSD schedule."""
import torch


def _orthogonalise(g):
    """Newton-Schulz iteration (quintic) on a stack of matrices [n, a, b], a <= b, in bf16."""
    x = g.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def _muon_step(params, grads, moment, lr, decay):
    """moment: [n, a, b] with a <= b; all tensors of one shape."""
    g = torch.stack(grads)
    if g.shape[1] > g.shape[2]:
        g = g.mT
    moment.lerp_(g, 0.05)
    u = _orthogonalise(g.lerp(moment, 0.95)).float()
    u = u * (0.2 * max(u.shape[1], u.shape[2]) ** 0.5)
    torch._foreach_mul_(params, 1 - lr * decay)
    torch._foreach_add_(
        params, list((u if params[0].shape == u.shape[1:] else u.mT).unbind()), alpha=-lr
    )


class Optim:
    """Step with a relative learning rate; weights: dict name -> f32 leaf tensor."""

    def __init__(self, weights, lr_muon=3e-3, lr_adam=2e-3, decay=0.1):
        self.lr_muon, self.lr_adam, self.decay = lr_muon, lr_adam, decay
        self.groups = {}
        for n, p in weights.items():
            if p.dim() == 2 and "embed" not in n:
                self.groups.setdefault(tuple(p.shape), []).append(p)
        self.moments = {
            s: torch.zeros(len(ps), min(s), max(s), device=ps[0].device)
            for s, ps in self.groups.items()
        }
        rest = [p for n, p in weights.items() if p.dim() == 1]
        embed = [p for n, p in weights.items() if "embed" in n]
        self.adam = torch.optim.AdamW(
            [dict(params=embed, weight_decay=0.01), dict(params=rest, weight_decay=0.0)],
            lr=lr_adam, betas=(0.9, 0.95), eps=1e-10, fused=True)
        self.all = list(weights.values())

    @torch.no_grad()
    def step(self, factor):
        for shape, ps in self.groups.items():
            _muon_step(
                ps, [p.grad for p in ps], self.moments[shape], self.lr_muon * factor, self.decay
            )
        for g in self.adam.param_groups:
            g["lr"] = self.lr_adam * factor
        self.adam.step()
        for p in self.all:
            p.grad = None

    def state(self):
        return {"moments": self.moments, "adam": self.adam.state_dict()}

    def load(self, state):
        for s, m in state["moments"].items():
            self.moments[s].copy_(m)
        self.adam.load_state_dict(state["adam"])

r"""DPF, dynamic pruning with feedback (Lin, Stich, Barba, Dmitriev and Jaggi 2020).

The gradient is taken at the masked weights and applied to the dense ones, so that what was left out may come back:

.. math::
    w_{t+1} = w_t - \gamma_t \nabla L(m_t \odot w_t).

Every 16 steps the mask becomes the largest weights of all layers together, of a share that falls along a cubic to the
wanted one at three quarters of the run; from there the mask stays. The result is :math:`m \odot w`. Momentum and weight
decay are those of the dense weights. Biases and BatchNorm stay and are counted.
"""

from pruning.training import Fitted, Policy, Problem, Training, largest, single

PERIOD, END = 16, 0.75


def num_kept(wanted: int, total: int, share: float) -> int:
    """Layer weights kept where ``share`` of the run is over: 1 - s = k + (1 - k) (1 - t / T)^3."""
    return round(wanted + (total - wanted) * (1 - min(share / END, 1.0)) ** 3)


class Feedback(Policy):
    """The mask by magnitude; weights outside go on learning."""

    feedback = True

    def after(self, training: Training, number: int) -> None:
        last = round(END * training.problem.num_steps)
        if number == last or (number < last and number % PERIOD == 0):
            places = training.layer_coordinates()
            share = number / training.problem.num_steps if number < last else END
            count = num_kept(training.wanted, len(places), share)
            mask = training.mask.clone()
            mask[places] = largest(training.weights[places].abs(), count)
            training.keep_only(mask)


def fit(problem: Problem, seed: int) -> Fitted:
    """One network."""
    training = Training(problem, Feedback(), seed).run("dpf")
    return single(training, f"mask every {PERIOD} steps up to {END:g} of the run")

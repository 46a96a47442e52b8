"""Windows end at the first draft that is not the target's draw."""

import pytest
import torch

from stepfloor.kernels.match_drafts import match_drafts, match_drafts_inputs

END = 9


@pytest.mark.parametrize(
    ("drafts", "drawn", "emitted", "accepted"),
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 5, 3, 4], [1, 5, -1, -1], 1),  # a later match does not count
        ([1, 2, 3], [7, 2, 3, 4], [7, -1, -1, -1], 0),
        ([1, -1, 3], [1, 2, 3, 4], [1, 2, -1, -1], 1),  # padding ends the window
        ([1, 2, 3], [1, -1, 3, 4], [1, -1, -1, -1], 1),  # a row that was not finite ends it without a token
        ([-1, -1, -1], [-1, 2, 3, 4], [-1, -1, -1, -1], 0),  # and does not match padding
        # An end token inside the window is a token like others here: who delivers the text stops at it (C-SPEC-01).
        ([1, END, 3], [1, END, 3, 4], [1, END, 3, 4], 3),
        ([], [4], [4], 0),
    ],
)
def test_windows_worked_out_by_hand(drafts: list[int], drawn: list[int], emitted: list[int], accepted: int) -> None:
    ours = match_drafts(torch.tensor([drafts], dtype=torch.int64), torch.tensor([drawn]))
    assert ours[0].tolist() == [emitted]
    assert ours[1].tolist() == [accepted]


def test_windows_do_not_disturb_each_other() -> None:
    inputs = match_drafts_inputs(64, 4, "cpu")
    emitted, accepted = match_drafts(**inputs)
    assert set(accepted.tolist()) == {0, 1, 2, 3, 4}
    for b in range(64):
        alone = match_drafts(inputs["drafts"][b : b + 1], inputs["drawn"][b : b + 1])
        assert torch.equal(alone[0][0], emitted[b])
        assert alone[1][0] == accepted[b]


def test_shapes_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 3\)"):
        match_drafts(torch.zeros(2, 3).long(), torch.zeros(2, 3).long())

"""A script as Hugging Face Accelerate's users write them."""

import gc

import torch
from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator()
    data = torch.utils.data.TensorDataset(torch.arange(64, dtype=torch.float32).unsqueeze(1))
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-5),
        torch.utils.data.DataLoader(data, batch_size=8),
    )
    seen = 0
    for (batch,) in loader:
        loss = (model(batch) - 2 * batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += len(batch)
    total = accelerator.gather(torch.tensor([seen])).tolist()
    print(f"{accelerator.process_index} of {accelerator.num_processes} {accelerator.device.type}")
    if accelerator.is_main_process:
        print("seen", total)
    # The model holds on to the process group, in a cycle of references; were both only
    # freed as the interpreter goes down, gloo's threads could abort the rank.
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    gc.collect()
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

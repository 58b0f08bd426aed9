"""Vision models that compute the same as torchvision's: a batch is [B, H, W, 3].

`resnet`, `regnet` and `vit` classify, `deeplab` segments with a ResNet; `vision_config` has the
fields that all of them share, `preset_table` their presets. `image_input` normalises images,
`norms` and `convolutions` are the layers, `dilated_convolution` has a faster gradient on a GPU,
`losses` has the losses.
"""

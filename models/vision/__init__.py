"""Models of images, which compute what torchvision's compute: a batch is [B, H, W, 3].

`resnet`, `regnet` and `vit` classify, `deeplab` segments with a ResNet; `vision_config` has the
fields that all of them share, `preset_table` the named shapes of all. `image_input` is how images
enter, `norms` and `convolutions` are the layers, `dilated_convolution` what is quickest on a GPU,
`losses` what the models are trained on.
"""

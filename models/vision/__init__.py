"""Models of images, which compute what torchvision's compute: rows are images [B, H, W, 3].

`resnet`, `regnet` and `vit` classify, `deeplab` segments with a ResNet; `vision_config` has the
fields that all of them share, `all_presets` the named shapes of all. `image_input` is how images
enter, `norms` and `convolutions` are the parts, `dilated_gradient` what is quickest on a GPU,
`image_losses` what the models are trained on.
"""
